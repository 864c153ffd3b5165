#!/usr/bin/env bash
# Set up, then train on the bundled toy corpus, translate and evaluate. Arguments go to `mtrain demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
# Waiting threads yield the CPU soon: on cores shared with other programs, the long default spin is far slower.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}
exec .venv/bin/mtrain demo "$@"
