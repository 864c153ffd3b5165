#!/usr/bin/env bash
# Set up, then train on the bundled toy corpus, translate and evaluate. Arguments go to `mtrain demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/mtrain demo "$@"
