#!/usr/bin/env bash
# Run the default tests with the lowest versions that pyproject.toml allows, in .venv-lowest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-lowest
"${PYTHON:-python3}" -m venv --clear $venv # else versions would stay that are not the lowest any more
$venv/bin/python -m pip install --quiet --disable-pip-version-check uv
$venv/bin/uv pip install --python $venv/bin/python --resolution lowest-direct -e '.[interop,languages,serve,tensorboard]'
# The tests' own tools are not part of what is installed with mtrain: their current versions serve.
$venv/bin/uv pip install --python $venv/bin/python pytest pytest-xdist hypothesis sacremoses httpx2
OMP_NUM_THREADS=1 $venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
