#!/usr/bin/env bash
# Kills, full disks and flipped bits, at full size: some minutes. Prints a table.
set -eu
cd "$(dirname "$0")/.."
exec .venv/bin/python scripts/torture.py "$@"
