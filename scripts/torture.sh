#!/usr/bin/env bash
# Inject kills, full disks and flipped bytes (twenty minutes) and fuzz the loaders (an hour). Prints a table.
set -eu
cd "$(dirname "$0")/.."
exec .venv/bin/python -m tests.support.faults "$@"
