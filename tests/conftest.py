"""Settings of every test, and the modules whose fixtures any test may use."""

import gc
import importlib
import os
import sys

import pytest
import torch
from hypothesis import settings

from mtrain.device import keep_freed_memory
from mtrain.kernels.reproducible import fix_workspaces

# Write byte code in any environment. Without it, each process that a test starts compiles the package, and
# each process of pytest-xdist compiles the package and all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
for name in ("FORCE_COLOR", "NO_COLOR", "SACREBLEU_SEED"):  # which change what commands print
    os.environ.pop(name, None)
sys.dont_write_bytecode = False
if not torch.cuda.is_available():  # read when Triton is imported, which PyTorch does for some functions
    os.environ["TRITON_INTERPRET"] = "1"
pytest.register_assert_rewrite("tests.support")
pytest_plugins = [
    "tests.support.browser",
    "tests.support.cli",
    "tests.support.comet",
    "tests.support.configs",
    "tests.support.encoding",
    "tests.support.faults.saves",
    "tests.support.models",
    "tests.support.significance",
    "tests.support.tokenizers",
    "tests.support.training",
    "tests.support.translation",
]


def skip_sync(descriptor: int) -> None:
    """In place of `os.fsync`, which waits for the disk; a killed process loses nothing it has written."""


os.fsync = skip_sync
keep_freed_memory()  # as the commands do; otherwise page faults take a fifth of the time
fix_workspaces()  # as `fit` does, before any test computes on a GPU
settings.register_profile("mtrain", deadline=None, derandomize=True)  # the same examples in every run
settings.load_profile("mtrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with training, whose files take longest, so that none of them is left for the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/unit/training/"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Compute with one thread, in this thread and in later ones, whatever the last test has set: sums over
    several threads differ in the last bit."""
    torch.set_num_threads(1)


torch.set_num_threads(1)  # also in fixtures of modules
gc.disable()  # until the tests are collected, which creates a million objects that all live on


def pytest_collection_finish() -> None:
    """Let no later garbage collection, and no forked process, touch what was imported and collected."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # a process that sooner or later trains, which needs these
        from tests.support.faults.processes import IMPORTS

        for module in IMPORTS:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let the garbage collections at the end of the process skip all that the tests have left."""
    gc.freeze()
