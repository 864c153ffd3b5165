"""Scoring a model on test sets, and scoring files of translations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.load import load_config
from mtrain.data.corpus import raise_errors, read_corpus, read_text
from mtrain.decoding.translate import Translator
from mtrain.errors import DataError, UsageError
from mtrain.evaluation.metrics import Score, score


class TestSet(NamedTuple):
    """Source sentences and one or more lists of reference translations."""

    name: str
    sources: list[str]
    references: list[list[str]]


def configured_test_sets(run_dir: Path, overrides: Sequence[str] = ()) -> list[TestSet]:
    """The test sets in `data.test` of a run.

    Raises UsageError if there are none, and DataError if one cannot be read.
    """
    file = run_dir / "config.yaml"
    is_run = (run_dir / "checkpoints").is_dir() and file.exists()
    tests = load_config(file, overrides).data.test if is_run else {}
    if not tests:
        raise UsageError(f"{run_dir}: no test sets are configured; give --source and --reference")
    sets = []
    for name, corpus in tests.items():
        pairs = list(raise_errors(read_corpus(corpus)))
        sets.append(TestSet(name, [pair.source for pair in pairs], [[pair.target for pair in pairs]]))
    return sets


def read_test_set(source: Path, references: Sequence[Path]) -> TestSet:
    """A test set from plain-text files with one sentence per line.

    Raises DataError if a file is missing or malformed, or if the numbers of lines differ.
    """
    sources, *others = _read_parallel(source, references)
    return TestSet(source.name, sources, others)


def evaluate_set(test: TestSet, translator: Translator, metrics: dict[str, Any]) -> list[Score]:
    """Translate a test set and score the translations."""
    translations = translator.translate(test.sources, scored=False)
    return score([translation.text for translation in translations], test.references, metrics)


def score_file(
    hypotheses: Path, references: Sequence[Path], metrics: dict[str, Any]
) -> tuple[int, list[Score]]:
    """The number of translations in a plain-text file, and their scores. Needs no model.

    Raises DataError if a file is missing or malformed, if it is empty, or if the numbers of lines differ.
    """
    translations, *others = _read_parallel(hypotheses, references)
    return len(translations), score(translations, others, metrics)


def _read_parallel(first: Path, others: Sequence[Path]) -> list[list[str]]:
    """The lines of files that must have the same number of lines."""
    lines = [read_text(file) for file in (first, *others)]
    for file, found in zip(others, lines[1:], strict=True):
        if len(found) != len(lines[0]):
            raise DataError(f"{first} has {len(lines[0])} lines but {file} has {len(found)}")
    return lines
