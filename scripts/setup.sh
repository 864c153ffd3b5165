#!/usr/bin/env bash
# Make .venv and install mtrain with its development tools, in the versions of constraints.txt.
# Does nothing if that was done before and neither list has changed. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=$(cat pyproject.toml scripts/constraints.txt | cksum)
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    echo "installing into .venv (the first time takes some minutes)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e '.[dev]'
    echo "$wanted" >.venv/installed
fi
