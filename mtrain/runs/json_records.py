"""Reading JSON that runs have recorded. What is missing or damaged is left out; nothing depends on it."""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtrain.regular_files import read_file

log = logging.getLogger(__name__)
Record = dict[str, Any]


def read_record(file: Path) -> Record | None:
    """The JSON object in a file; None if it is missing or damaged."""
    record = None
    with suppress(OSError):
        record = parse_json(read_file(file).decode("utf-8", "replace"))
    return record if isinstance(record, dict) else None


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """A context manager that logs a warning instead of raising OSError if a file cannot be read, and ignores
    a missing file."""
    try:
        with suppress(FileNotFoundError):
            yield
    except OSError as error:
        log.warning("%s: cannot be read: %s; it is left out", file, error.strerror)


def parse_json(text: str) -> Any:
    """The value of a JSON text; None if it is not valid."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def to_number(value: object) -> float:
    """A value of a record as a float; NaN if it is not a number, or too large for one."""
    with suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return math.nan


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested JSON objects, in dotted form, and their values. A list of one object counts as
    that object."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        [value] = value
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}".lstrip("."))
    else:
        yield path, value
