"""The parts of `scripts/gpu_check.sh`: checks and measurements of mtrain on one device.

`python -m gpu --help` lists them. All of them use random weights and random sentences with the lengths of
ordinary text, except for `resume`, which trains on the toy corpus.
"""
