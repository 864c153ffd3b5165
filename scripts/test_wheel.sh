#!/usr/bin/env bash
# Build a wheel, install it into an empty environment, and run init and the demo in an empty folder.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check build
"$work/venv/bin/python" -m build --wheel --outdir "$work/dist" .
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt "$work"/dist/*.whl
mkdir "$work/empty"
cd "$work/empty"
"$work/venv/bin/python" -c "import mtrain, sys; sys.exit(mtrain.__file__.startswith('$root'))"
printf 'One\nTwo\n' > train.en
printf 'Eins\nZwei\n' > train.de
"$work/venv/bin/mtrain" init train.en train.de
"$work/venv/bin/mtrain" demo "$@"
