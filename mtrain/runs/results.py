"""The scores of a run's best model on its test sets.

They are computed once, and recorded in `RUN/test_scores.json`, and in info.json and the card of the model.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

from mtrain.checkpoint import model_info
from mtrain.checkpoint.model_card import record_test_scores
from mtrain.errors import MtrainError
from mtrain.evaluation.evaluate import configured_test_sets, evaluate_set
from mtrain.evaluation.metrics import MetricScore, make_metrics
from mtrain.regular_files import read_file
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import MANIFEST, sha256, sha256_of_json

if TYPE_CHECKING:
    from mtrain.decoding.translate import Translator

log = logging.getLogger(__name__)

FILE = "test_scores.json"
_SCORING = 1  # to be increased when mtrain translates or scores otherwise; older scores are not used again


class Result(NamedTuple):
    """The scores of a model on a test set."""

    name: str
    sentences: int
    scores: list[MetricScore]


class _Record(BaseModel):
    key: str  # depends on the model, the decoding settings and the test sets
    model: str | None = None  # the SHA-256 of its manifest; None in records of earlier versions
    sets: list[Result]


def score_test_sets(run_dir: Path, translator: "Translator") -> Iterator[Result]:
    """Score the model on each configured test set. Recorded scores of the same model, settings and sets are
    used again. Raises DataError if a test set cannot be read, StorageError if the record cannot be written.
    """
    tests = configured_test_sets(run_dir)
    settings = translator.decoding.model_dump(mode="json", exclude={"batch_tokens", "workers"})
    key = sha256_of_json([_SCORING, translator.fingerprint, settings, tests])
    record = _read(run_dir)
    if record is not None and record.key == key:
        results = record.sets
        yield from results
    else:
        results = []
        for test in tests:
            metrics = make_metrics(("bleu", "chrf"), test.target_lang(translator.target_lang))
            scores = evaluate_set(test, translator, metrics)
            results.append(Result(test.name, len(test.sources), scores))
            yield results[-1]
        named = [{**each._asdict(), "scores": [s._asdict() for s in each.scores]} for each in results]
        contents = {"key": key, "model": translator.fingerprint, "sets": named}
        write_atomically(run_dir / FILE, json.dumps(contents, indent=1) + "\n")
    _describe_model(run_dir / "model", translator.fingerprint, results)


def _describe_model(folder: Path, fingerprint: str, sets: Sequence[Result]) -> None:
    """Add the scores to info.json and the card of the model, unless it is another one by now. A failure is
    logged."""
    try:
        if sha256(folder / MANIFEST) == fingerprint:
            record_test_scores(folder, list(described_scores(sets)))
    except (MtrainError, OSError, ValueError) as error:
        log.warning("%s: its card lacks the test scores: %s", folder, error)


def described_scores(sets: Iterable[Result]) -> Iterator[model_info.Score]:
    """Scores on test sets as info.json has them. Raises ValueError if one of them does not fit in there."""
    for test in sets:
        for score in test.scores:
            yield model_info.Score(
                set=test.name,
                split="test",
                sentences=test.sentences,
                metric=score.metric,
                title=score.detail.partition("|")[0],
                value=score.score,
                signature=score.signature,
            )


def read_results(run_dir: Path) -> list[Result]:
    """The recorded scores of the best model of a run; none if there is no record, if it is damaged, or if the
    best model has changed since."""
    record = _read(run_dir)
    if record is None and (run_dir / FILE).exists():
        log.warning("%s: damaged; the report will lack the scores on test sets", run_dir / FILE)
    with suppress(OSError):  # the model may have been moved
        if record and record.model not in (None, sha256(run_dir / "model" / MANIFEST)):
            return []
    return record.sets if record else []


def _read(run_dir: Path) -> _Record | None:
    with suppress(OSError, ValueError):
        return _Record.model_validate_json(read_file(run_dir / FILE))
    return None
