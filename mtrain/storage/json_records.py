"""Reading JSON that runs have recorded. What is missing or damaged is left out; nothing depends on it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_record(file: Path) -> Record | None:
    """The JSON object in a file; None if it is missing or damaged."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return None
    record = parse_json(text)
    return record if isinstance(record, dict) else None


def read_steps(file: Path) -> Iterator[Record]:
    """The records of a file of JSON lines that have a step, without damaged ones; none if it is missing."""
    if not file.is_file():  # reading from a pipe would block
        return
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            record = parse_json(line)
            if isinstance(record, dict) and math.isfinite(to_number(record.get("step"))):
                yield record


def parse_json(text: str) -> Any:
    """The value of a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def to_number(value: object) -> float:
    """A value of a record as a float; NaN if it is not a number, or too large for one."""
    try:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        return math.nan
