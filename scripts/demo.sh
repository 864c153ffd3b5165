#!/usr/bin/env bash
# Set up, train on the bundled toy corpus, translate, and score sentences whose combinations were never seen.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
mtrain=.venv/bin/mtrain
run=runs/toy-en-fr
# Threads that wait give way soon: on cores shared with other programs the default, long spinning, costs far more.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}

$mtrain fit configs/toy-en-fr.yaml

echo
for english in "I like oranges." "I don't like pineapples and oranges." "Does she eat red apples?"; do
    echo "$english  ->  $($mtrain translate $run --quiet "$english")"
done
french=$($mtrain translate $run --quiet "I like oranges.")
if [ "$french" != "J'aime les oranges." ]; then
    echo "demo: expected \"J'aime les oranges.\" but got \"$french\"" >&2
    exit 1
fi

echo
$mtrain evaluate $run --quiet
$mtrain evaluate $run --quiet --metrics bleu --json | .venv/bin/python -c '
import json, sys
bleu = json.load(sys.stdin)["toy"]["scores"][0]["score"]
sys.exit(0 if bleu >= 97 else f"demo: BLEU {bleu:.2f} on held-out combinations; at least 97 expected")'
