"""Settings of every test, and the modules whose fixtures any test may use."""

import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")
pytest_plugins = [
    "tests.support.cli",
    "tests.support.comet",
    "tests.support.configs",
    "tests.support.encoding",
    "tests.support.tokenizers",
    "tests.support.training",
    "tests.support.translation",
]

torch.set_num_threads(1)  # sums over threads differ in the last bit
settings.register_profile("mtrain", deadline=None, derandomize=True)  # the same examples in every run
settings.load_profile("mtrain")
