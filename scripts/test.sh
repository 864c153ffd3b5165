#!/usr/bin/env bash
# Set up, then format, lint, types and the default tests.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec bash scripts/check.sh
