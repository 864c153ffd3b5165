"""Translations that validation records in the run folder, for `mtrain report`.

`samples.jsonl` has the translations of a few validation sentences, one line for each validation.
`best_validation.json` has the translations of the validation set by the best model so far, of at most BEST
sentences.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtrain.errors import StorageError
from mtrain.regular_files import read_lines
from mtrain.storage.atomic import write_atomically

log = logging.getLogger(__name__)

SAMPLES = 8  # sentences whose translations are recorded at each validation
BEST = 5000  # sentences whose translations by the best model are recorded, at most


def record_translations(run_dir: Path, step: int, texts: Mapping[str, Sequence[str]], best: bool) -> None:
    """Record the `source`, `reference` and `translation` of the sentences of a validation at `step`. Lines of
    the same or later steps, which an interrupted run may have written, are replaced. A failure is logged; it
    does not end the run."""
    sentences = [dict(zip(texts, row, strict=True)) for row in zip(*texts.values(), strict=True)]

    def line(most: int) -> str:
        """A record of at most `most` sentences, evenly spaced over the validation set."""
        count = min(most, len(sentences))
        chosen = [sentences[row * len(sentences) // count] for row in range(count)]
        return json.dumps({"step": step, "sentences": chosen}, ensure_ascii=False) + "\n"

    file = run_dir / "samples.jsonl"
    try:
        earlier = [text for text in lines_of(file) if step_of(text) < step]
        write_atomically(file, "".join([*earlier, line(SAMPLES)]))
        if best:
            write_atomically(run_dir / "best_validation.json", line(BEST))
    except StorageError as error:
        log.warning("%s; the report will lack the translations of step %d", error, step)


def remove_later_samples(run_dir: Path, step: int) -> None:
    """Remove the lines of samples.jsonl after `step`, from which a run is resumed. A failure is logged."""
    file = run_dir / "samples.jsonl"
    try:
        if any(step_of(line) > step for line in lines_of(file)):
            write_atomically(file, "".join(line for line in lines_of(file) if step_of(line) <= step))
    except StorageError as error:
        log.warning("%s; lines after step %d are not removed", error, step)


def lines_of(file: Path) -> list[str]:
    """The complete lines of a file. Raises StorageError if it cannot be read."""
    try:
        lines = read_lines(file) if file.exists() else ()
        return [line.decode("utf-8", "replace") for line in lines if line.endswith(b"\n")]
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {error.strerror}") from None


def step_of(line: str) -> float:
    """The step of a line; infinity for one that is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
