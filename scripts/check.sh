#!/usr/bin/env bash
# Format, lint, types and the default tests, in the environment that setup.sh made. Arguments go to pytest.
# Without arguments, the script then runs the tests marked `gpu` that are not slow on a simulated device, and counts
# operations, copies and waits of a GPU.
# Three processes of one thread each share the tests, file by file, in the order of tests/conftest.py: xdist
# would run the files with the fewest tests last, which are whole trainings. Some tests mostly wait, for a
# process to be missed, so three processes end earlier than two on two cores; four would import and collect once more.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
$bin/ruff format --check .
$bin/ruff check .
$bin/mypy
OMP_NUM_THREADS=1 $bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
if [ $# = 0 ]; then
    $bin/python scripts/simulate_cuda check tests counts || [ $? = 77 ] # 77: skipped, for instance without g++
fi
