"""The commented config that `mtrain init` writes: the keys that a beginner changes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from mtrain.config.corpora import Corpora, names_of
from mtrain.config.language_names import language_name
from mtrain.config.presets import PRESETS
from mtrain.config.yaml_io import to_yaml_line

_WIDTH = 110  # of a line
Sized = tuple[dict[str, Any], int]  # a corpus as a config describes it, and its number of pairs


class Starter(NamedTuple):
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


def write_starter(starter: Starter) -> str:
    """The text of a config. Removing the `#` before a key that is commented out also gives a valid config."""
    source, target = language_name(starter.source_lang), language_name(starter.target_lang)
    presets = ", ".join(name for name in PRESETS if "_" not in name)
    minutes = starter.max_minutes
    limit = "# max_minutes: 60" if minutes is None else f"max_minutes: {to_yaml_line(minutes)}"
    return f"""\
# {source} to {target}. Written by `mtrain init`.
#
#   mtrain check {starter.file}      report problems in the data
#   mtrain fit {starter.file}        train; the same command resumes an interrupted training
#
# Paths are relative to the folder in which you run these commands. docs/configuration.md of mtrain lists all
# keys; keys that are not here have good defaults.

# The folder of the trained model, checkpoints and metrics. Another folder starts another training.
run_dir: {to_yaml_line(starter.run_dir)}

data:
  source_lang: {to_yaml_line(starter.source_lang)}
  target_lang: {to_yaml_line(starter.target_lang)}
{_data(starter)}
model:
  # auto is the default: mtrain chooses the sizes of model and vocabulary, the learning rate and the rest of
  # the recipe for this corpus and time limit, and logs its choices. It does not change keys that you add.
  # Other presets give sizes only, from the smallest to the largest: {presets}
  preset: auto

# tokenizer:
#   vocab_size: 8000     # number of subword pieces; auto chooses it, too

training:
  # Minutes of training and validation, summed over resumed runs. The recipe is planned for this limit, or for
  # fewer minutes if more would not help. Without a limit, only `patience` ends training.
  {limit}
  # max_epochs: 10       # another limit: passes over the corpus
  # Training ends after so many validations without improvement.
  patience: 10

decoding:
  # Number of hypotheses of beam search: 1 is fastest, more may be better.
  beam_size: 5
"""


def _data(starter: Starter) -> str:
    """The corpora."""
    pairs = sum(count for _, count in starter.train)
    lines = [f"  # {pairs:,} pairs", *_corpora("train", starter.train), *_stages(starter.train)]
    if starter.validation:
        count = sum(count for _, count in starter.validation)
        lines += ["  # Validation selects the best model.", f"  # {count:,} pairs"]
        lines += _corpora("validation", starter.validation)
    else:
        lines += [
            "  # Validation selects the best model. holdout: number of pairs taken out of `train` for it. To",
            "  # validate on files instead, give them as in `train`.",
            f"  validation: {{holdout: {holdout_size(pairs)}}}",
        ]
    if starter.test:
        lines.append("  # `mtrain evaluate` computes scores on these sets, and `mtrain fit` at its end.")
        lines.append("  test:")
        lines += [
            f"    {to_yaml_line(name)}: {to_yaml_line(spec)}     # {count:,} pairs"
            for name, (spec, count) in starter.test.items()
        ]
    if starter.skipped:
        lines += [
            f"  # Some lines cannot be read ({starter.skipped}).",
            "  # skip: drop and count them; error: stop at the first.",
            "  bad_lines: skip",
        ]
    return "".join(f"{line}\n" for line in lines)


def _stages(train: Sequence[Sized]) -> list[str]:
    """How to mix several corpora in other proportions, if that fits in a line."""
    names = names_of(TypeAdapter(Corpora).validate_python([spec for spec, _ in train]))
    stages = f"  # stages: {to_yaml_line([{'shares': dict.fromkeys(names, 1)}])}"
    if len(names) == 1 or len(stages) > _WIDTH:
        return []
    return ["  # Other proportions of the corpora than those of their sizes: here, equal shares.", stages]


def _corpora(key: str, corpora: Sequence[Sized]) -> list[str]:
    if len(corpora) == 1:
        return [f"  {key}: {to_yaml_line(corpora[0][0])}"]
    return [f"  {key}:", *(f"    - {to_yaml_line(spec)}     # {count:,} pairs" for spec, count in corpora)]
