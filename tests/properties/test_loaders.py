"""Loading mutated files succeeds or raises the error of its kind.

`scripts/torture.sh` does the same for an hour, in processes whose time and memory it measures.
"""

import random
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import strategies as st

from mtrain.errors import ModelError, UsageError
from tests.support.faults.fuzz import LOADERS, mutate_for
from tests.support.training import fit_on_cpu


@pytest.mark.parametrize("kind", LOADERS)
def test_loading_mutated_files_succeeds_or_is_an_error(tried, make_config, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(time, "sleep", lambda _: None)  # before a model folder is read again
    run = fit_on_cpu(make_config(training={"max_steps": 2, "validate_every": 2}))

    @tried(12, seed=st.integers(0, 2**60))
    def check(seed):
        shutil.rmtree(tmp_path / "mutated", ignore_errors=True)
        copy = Path(shutil.copytree(run, tmp_path / "mutated"))
        mutate_for(kind, copy, random.Random(seed))
        with suppress(UsageError if kind == "config" else ModelError):
            LOADERS[kind](copy, run)
