"""Test sets: which a run has, and what a model scores on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.load import load_config
from mtrain.data.corpus import clean, read_corpus, read_text
from mtrain.decoding.translate import Translator
from mtrain.errors import DataError, UsageError
from mtrain.evaluation.metrics import Score, score


class TestSet(NamedTuple):
    """Sources, the references to hold their translations against, and translations if they are given."""

    name: str
    sources: list[str]
    references: list[list[str]]
    hypotheses: list[str] | None = None


def configured_test_sets(run_dir: Path, overrides: Sequence[str] = ()) -> list[TestSet]:
    """The `data.test` sets of a run. Raises UsageError if there are none, DataError if one cannot be read."""
    file = run_dir / "config.yaml"
    is_run = (run_dir / "checkpoints").is_dir() and file.exists()
    tests = load_config(file, overrides).data.test if is_run else {}
    if not tests:
        raise UsageError(f"{run_dir}: no test sets are configured here; give --source and --reference")
    sets = []
    for name, corpus in tests.items():
        pairs = list(clean(read_corpus(corpus)))
        sets.append(TestSet(name, [pair.source for pair in pairs], [[pair.target for pair in pairs]]))
    return sets


def test_set_from_files(source: Path | None, references: Sequence[Path], hypotheses: Path | None) -> TestSet:
    """A test set of plain-text files, of which either `source` or `hypotheses` is given.

    Raises DataError if a file is missing or malformed, or if their line counts differ.
    """
    scored = source or hypotheses or Path()
    lines, *others = [read_text(file) for file in (scored, *references)]
    for reference, other in zip(references, others, strict=True):
        if len(other) != len(lines):
            raise DataError(f"{scored} has {len(lines)} lines but {reference} has {len(other)}")
    return TestSet(scored.name, lines, others, None if source else lines)


def evaluate_set(test: TestSet, translator: Translator, metrics: dict[str, Any]) -> list[Score]:
    """Translate a test set, unless its translations are given, and score it."""
    hypotheses = test.hypotheses or [
        translation.text for translation in translator.translate(test.sources, scored=False)
    ]
    return score(hypotheses, test.references, metrics)
