"""The translations that a run has recorded in `samples.jsonl` and `best_validation.json`."""

import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from mtrain.regular_files import read_file, read_lines
from mtrain.runs.json_records import reading

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sentence:
    """A validation sentence and its translation."""

    source: str
    reference: str
    translation: str


@dataclass(frozen=True)
class Translations:
    """Translations at one step."""

    step: int
    sentences: list[Sentence]  # at least one


_TRANSLATIONS = TypeAdapter(Translations)


def read_samples(file: Path) -> list[Translations]:
    """The translations of each validation, in the order of training. Damaged lines are left out, with a
    warning."""
    found, damaged = [], 0
    with reading(file):
        for line in read_lines(file):
            record = _parsed(line)
            if record is not None:
                found.append(record)
            elif line.strip():
                damaged += 1
    if damaged:
        log.warning("%s: %d damaged line(s) are left out of the report", file, damaged)
    return sorted(found, key=lambda record: record.step)


def read_best(file: Path) -> Translations | None:
    """The translations of the validation set by the best model; None if they are missing or, with a warning,
    if they are damaged."""
    with reading(file):
        record = _parsed(read_file(file))
        if record is None:
            log.warning("%s: damaged; it is left out of the report", file)
        return record
    return None


def _parsed(text: bytes) -> Translations | None:
    try:
        record = _TRANSLATIONS.validate_json(text)
    except ValueError:
        return None
    return record if record.sentences else None
