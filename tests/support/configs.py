"""A minimal config, and fixtures that load it with changes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.config.load import load_config
from mtrain.config.schema import Config
from mtrain.errors import UsageError

MINIMAL = """
run_dir: runs/x
data: {source_lang: en, target_lang: fr, train: {toy: train}, validation: {toy: validation}}
training: {max_steps: 10}
"""


@pytest.fixture
def load_text(tmp_path: Path) -> Callable[..., Config]:
    """Load a config text with `--set` overrides: `load_text("seed=2", text=MINIMAL)`."""

    def load_text(*overrides: str, text: str = MINIMAL) -> Config:
        file = tmp_path / "c.yaml"
        file.write_text(text, encoding="utf-8", newline="")
        return load_config(file, overrides)

    return load_text


@pytest.fixture
def rejection(load_text: Callable[..., Config]) -> Callable[..., str]:
    """Load an invalid config, and return the one-line message without the place that it begins with."""

    def rejection(*overrides: str, text: str = MINIMAL) -> str:
        with pytest.raises(UsageError) as caught:
            load_text(*overrides, text=text)
        assert caught.value.exit_code == 2
        message = str(caught.value)
        assert "\n" not in message
        place, _, problem = message.partition(": ")
        assert "c.yaml" in place or place.startswith("--set")
        return problem

    return rejection
