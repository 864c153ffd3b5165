#!/usr/bin/env bash
# Kills, full disks, flipped bits (twenty minutes) and damaged folders (an hour), at full size. Prints a table.
set -eu
cd "$(dirname "$0")/.."
exec .venv/bin/python scripts/torture.py "$@"
