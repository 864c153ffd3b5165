"""The metrics that a run has recorded in `metrics.jsonl`: the scores of its validations, and its curves."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.checkpoint.model_info import Score
from mtrain.regular_files import read_lines
from mtrain.runs.json_records import Record, parse_json, reading, to_number

# Of the metrics of a validation.
_TITLES = {"nll": "nll (nats/token)", "bleu": "BLEU", "chrf": "chrF2", "auc": "AUC"}
Floats = npt.NDArray[np.float64]
POINTS = 1000  # of a curve, at most


class Curve(NamedTuple):
    """Values of one metric in the order of training."""

    steps: Floats
    tokens: Floats  # target tokens seen
    hours: Floats  # of training and validation
    values: Floats


def read_metrics(run_dir: Path) -> Iterator[Record]:
    """The lines of metrics.jsonl that have a step, without damaged ones; none if the file is missing. Stops
    with a warning where the file cannot be read."""
    file = run_dir / "metrics.jsonl"
    with reading(file):
        for line in read_lines(file):
            record = parse_json(line.decode("utf-8", "replace"))
            if isinstance(record, dict) and math.isfinite(to_number(record.get("step"))):
                yield record


def validation_scores(lines: Iterable[Record]) -> dict[int, list[Score]]:
    """The scores of a run on its validation set by step, from the lines of metrics.jsonl."""
    validations: dict[int, list[Score]] = {}
    for line in lines:
        step, found = line["step"], line.get("validation")
        if isinstance(step, int) and 0 <= step < 2**63 and isinstance(found, dict):
            titles = {**_TITLES, "nll": "nll (nats/pair)"} if "auc" in found else _TITLES
            validations[step] = [
                Score(set="validation set", split="validation", metric=metric, title=title, value=value)
                for metric, title in titles.items()
                if math.isfinite(value := to_number(found.get(metric)))
            ]
    return validations


def read_curves(lines: list[Record]) -> dict[str, Curve]:
    """The curves of a run by metric, from the lines of metrics.jsonl; validation metrics begin with
    `validation_`. Empty if no step is recorded."""
    # Each axis has to increase.
    axes = ("step", "seconds")
    lines = [line for line in lines if all(math.isfinite(to_number(line.get(axis))) for axis in axes)]
    lines.sort(key=lambda line: to_number(line["step"]))
    of_steps = (line for line in lines if "loss" in line)
    training = [line for line in of_steps if math.isfinite(to_number(line.get("target_tokens")))]
    curves = {}
    if training:
        steps, seconds = _column(training, "step"), _column(training, "seconds")
        tokens = _column(training, "target_tokens")
        for name in ("loss", "nll", "learning_rate", "grad_norm", "target_tokens_per_second", "data_seconds"):
            values = _column(training, name)
            reduce = np.max if name == "grad_norm" else np.mean
            curves[name] = _downsampled(Curve(steps, tokens, seconds / 3600, values), reduce)
        curves["perplexity"] = curves["nll"]._replace(values=np.exp(np.minimum(curves["nll"].values, 700)))
        validations = [line for line in lines if isinstance(line.get("validation"), dict)]
        at, hours = _column(validations, "step"), _column(validations, "seconds") / 3600
        seen = _column(validations, "target_tokens")  # which earlier versions did not record
        if len(at):
            seen = np.where(np.isfinite(seen), seen, np.interp(at, [0, *steps], [0, *tokens]))
        for name in ("nll", "perplexity", "bleu", "chrf", "auc"):
            values = _column([line["validation"] for line in validations], name)
            best = np.min if name in ("nll", "perplexity") else np.max
            curves[f"validation_{name}"] = _downsampled(Curve(at, seen, hours, values), best)
    return curves


def _downsampled(curve: Curve, reduce: Callable[[Floats], np.float64]) -> Curve:
    """At most POINTS points, each reduced from consecutive values. Values that are not finite are left out,
    unless there are no others."""
    if len(curve.values) <= POINTS:
        return curve
    chunks = np.array_split(np.arange(len(curve.values)), POINTS)
    last = [chunk[-1] for chunk in chunks]
    finite = [curve.values[chunk][np.isfinite(curve.values[chunk])] for chunk in chunks]
    values = np.array([reduce(chunk) if len(chunk) else np.nan for chunk in finite])
    return Curve(curve.steps[last], curve.tokens[last], curve.hours[last], values)


def _column(records: Sequence[Record], name: str) -> Floats:
    """The numbers of a key; NaN for missing numbers, and for numbers that JSON cannot express."""
    return np.array([to_number(record.get(name)) for record in records], np.float64)
