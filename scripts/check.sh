#!/usr/bin/env bash
# Format, lint, types and the default tests, in the environment that setup.sh made. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
$bin/ruff format --check .
$bin/ruff check .
$bin/mypy
$bin/python -m pytest "$@"
