"""The scores of a run's best model on its test sets, recorded in `RUN/test_scores.json`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtrain.decoding.translate import Translator
from mtrain.evaluation.evaluate import configured_test_sets, evaluate_set
from mtrain.evaluation.metrics import make_metrics
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import sha256_of_json

FILE = "test_scores.json"


def score_test_sets(run_dir: Path, translator: Translator) -> Iterator[dict[str, Any]]:
    """Score the model on each configured test set: `name`, `sentences` and `scores`. Recorded scores of the
    same model, settings and sets are used again. Raises DataError if a test set cannot be read, StorageError
    if the record cannot be written."""
    tests = configured_test_sets(run_dir)
    settings = translator.decoding.model_dump(mode="json", exclude={"batch_tokens", "workers"})
    key = sha256_of_json([translator.fingerprint, settings, tests])
    recorded = _recorded(run_dir / FILE, key)
    if recorded:
        yield from recorded
        return
    metrics = make_metrics(("bleu", "chrf"), translator.target_lang)
    sets = []
    for test in tests:
        scores = [score._asdict() for score in evaluate_set(test, translator, metrics)]
        sets.append({"name": test.name, "sentences": len(test.sources), "scores": scores})
        yield sets[-1]
    write_atomically(run_dir / FILE, json.dumps({"key": key, "sets": sets}, indent=1) + "\n")


def _recorded(file: Path, key: str) -> list[dict[str, Any]]:
    """The recorded sets, if the record has this key."""
    try:
        record = json.loads(file.read_bytes())
        return list(record["sets"]) if record["key"] == key else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
