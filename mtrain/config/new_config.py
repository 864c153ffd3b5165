"""The commented config that `mtrain init` writes: the keys that a beginner changes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from mtrain.config.language_names import language_name
from mtrain.config.sections.corpora import Corpora, names_of
from mtrain.config.sections.presets import PRESETS
from mtrain.config.yaml_io import to_yaml_line
from mtrain.templates import load_templates

_WIDTH = 110  # of a line
Sized = tuple[dict[str, Any], int]  # a corpus as a config describes it, and its number of pairs


class NewConfig(NamedTuple):
    """What a new config is about."""

    file: str  # where it will be, as the user types it in commands
    run_dir: str
    source_lang: str
    target_lang: str
    train: Sequence[Sized]
    validation: Sequence[Sized]  # empty: hold pairs out
    test: Mapping[str, Sized]
    max_minutes: float | None
    skipped: str = ""  # if not empty, unreadable pairs are skipped; what is wrong with the first


def holdout_size(pairs: int) -> int:
    """How many of some training pairs to hold out for validation: 5%, up to 1,000."""
    return max(1, min(1000, pairs // 20))


def new_config_text(config: NewConfig) -> str:
    """The text of a config. Removing the `#` before a key that is commented out also gives a valid config."""
    pairs = sum(count for _, count in config.train)
    templates = load_templates("mtrain.config", yaml=to_yaml_line, number="{:,}".format)
    return templates.get_template("new_config.yaml").render(
        config=config,
        source=language_name(config.source_lang),
        target=language_name(config.target_lang),
        pairs=pairs,
        stages=_stages(config.train),
        holdout=holdout_size(pairs),
        presets=", ".join(name for name in PRESETS if "_" not in name),
    )


def _stages(train: Sequence[Sized]) -> str:
    """How to mix several corpora in equal shares; empty if this does not fit in a line."""
    names = names_of(TypeAdapter(Corpora).validate_python([spec for spec, _ in train]))
    stages = to_yaml_line([{"shares": dict.fromkeys(names, 1)}])
    return stages if len(names) > 1 and len(f"  # stages: {stages}") <= _WIDTH else ""
