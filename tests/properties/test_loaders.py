"""Random bytes and mutated folders given to whatever loads them: an error that says so, or success.

`scripts/torture.sh` does the same for an hour, in processes whose time and memory it measures.
"""

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import strategies as st
from tortures.fuzz import LOADERS, damage_for

from mtrain.errors import ModelError, UsageError
from tests.support.training import go


@pytest.mark.parametrize("kind", LOADERS)
def test_any_damage_is_an_error_or_none(tried, make_config, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("mtrain.checkpoint.model_folder.time.sleep", lambda _: None)  # before another try
    run = go(make_config(training={"max_steps": 2, "validate_every": 2}))

    @tried(20, seed=st.integers(0, 2**60))
    def check(seed):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        copy = Path(shutil.copytree(run, tmp_path / "damaged"))
        damage_for(kind, copy, random.Random(seed))
        with suppress(UsageError if kind == "config" else ModelError):
            LOADERS[kind](copy, run)
