#!/usr/bin/env bash
# Make .venv and install mtrain with its development tools, in the versions of constraints.txt.
# Does nothing if that was done before, neither list has changed, and the folder has not moved. PYTHON chooses the
# interpreter. If its version differs from the version in .venv, or if .venv cannot be used, .venv is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted="$(cat pyproject.toml scripts/constraints.txt | cksum) $PWD"
version='import sys; print(*sys.version_info[:2])'
current=$(.venv/bin/pip --version >/dev/null 2>&1 && .venv/bin/python -c "$version" || true)
if [ -z "$current" ] || { [ -n "${PYTHON:-}" ] && [ "$current" != "$("$PYTHON" -c "$version")" ]; }; then
    "${PYTHON:-python3}" -c 'import sys
if sys.version_info < (3, 11): sys.exit("error: mtrain needs Python 3.11 or newer; set PYTHON, as in PYTHON=python3.12")'
    "${PYTHON:-python3}" -m venv --clear .venv
fi
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    echo "installing into .venv (the first time takes some minutes)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e '.[dev]'
    echo "$wanted" >.venv/installed
fi
