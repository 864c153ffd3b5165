"""What a run folder records, as the report needs it. Missing or damaged files are named, and not fatal."""

import json
import math
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.checkpoint.model_info import is_run
from mtrain.config.yaml_io import read_yaml_file
from mtrain.data.preparing.report import RecordedFindings, read_findings
from mtrain.data.store.folder import VALIDATION, read_summary
from mtrain.errors import ModelError, MtrainError, UsageError
from mtrain.evaluation.test_scores import TestScores, read_test_scores
from mtrain.regular_files import read_lines
from mtrain.runs.translations import Translations, read_best, read_samples
from mtrain.storage.json_records import Record, parse_json, read_steps, reading, to_number

Floats = npt.NDArray[np.float64]
POINTS = 1000  # of a curve, at most


class Curve(NamedTuple):
    """Values of one metric in the order of training."""

    steps: Floats
    tokens: Floats  # target tokens seen
    hours: Floats  # of training and validation
    values: Floats


class RunRecords(NamedTuple):
    """The records of a run."""

    name: str
    folder: Path
    config: Record
    curves: dict[str, Curve]  # by metric; those of validation begin with `validation_`
    skipped_steps: int  # whose loss or gradient was not finite
    samples: list[Translations]  # of each validation
    best: Translations | None  # by the best model
    findings: RecordedFindings | None  # of the data check
    summary: Record  # of the data folder; empty if unknown
    examples: list[str]  # validation sources, for attention maps
    test_scores: list[TestScores]  # of the best model
    missing: list[str]  # what the report lacks

    @property
    def is_classifier(self) -> bool:
        """Whether the model is a pair classifier, which does not translate."""
        return config_section(self.config, "model").get("head") == "pair_classifier"


def read_run(folder: Path, name: str) -> RunRecords:
    """Read the records of a run folder. Raises ModelError if it is not one, UsageError if it has no steps."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: {'not a folder' if folder.exists() else 'no such run folder'}")
    lost = [name for name in ("config.yaml", "metrics.jsonl") if not (folder / name).exists()]
    if lost and is_run(folder):
        raise ModelError(f"{folder / lost[0]}: missing; restore it to make a report")
    if lost:
        raise ModelError(
            f"{folder}: not a run folder: it has no config.yaml or no metrics.jsonl; give the run_dir of a "
            "training"
        )
    config = read_yaml_file(folder / "config.yaml", ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{folder}/config.yaml: damaged: it has no keys; restore it")
    lines = list(read_steps(folder / "metrics.jsonl"))
    curves = _curves(lines)
    if not curves:
        raise UsageError(f"{folder}/metrics.jsonl: has no steps yet; train the run first")
    samples, best = read_samples(folder / "samples.jsonl"), read_best(folder / "best_validation.json")
    data = Path(str(config_section(config, "data").get("folder") or folder / "data"))
    findings = read_findings(data)
    try:
        summary = read_summary(data)
    except MtrainError:
        summary = {}
    absent = {
        "the findings of the data check (check.json)": findings is None,
        "validation samples (samples.jsonl)": not samples,
        "the translations of the validation set (best_validation.json)": best is None,
        "the model": not (folder / "model").is_dir(),
    }
    missing = [what for what, is_missing in absent.items() if is_missing]
    recorded = samples[-1] if samples else best
    examples = [each.source for each in recorded.sentences] if recorded else _first_sources(data)
    skipped = [to_number(line.get("skipped_steps")) for line in lines]
    skipped_steps = int(max([count for count in skipped if math.isfinite(count)], default=0))
    found = curves, skipped_steps, samples, best, findings, summary, examples
    return RunRecords(name, folder, config, *found, read_test_scores(folder), missing)


def names_of(folders: Sequence[Path]) -> list[str]:
    """For each run folder, the shortest end of its path that distinguishes it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    if len({*parts}) < len(parts):
        raise UsageError(f"{_repeated(folders)}: given twice; give each run once")
    names = []
    for path in parts:
        length = next(n for n in range(1, len(path) + 1) if [p[-n:] for p in parts].count(path[-n:]) == 1)
        names.append("/".join(path[-length:]))
    return names


def _repeated(folders: Sequence[Path]) -> Path:
    resolved = [folder.resolve() for folder in folders]
    return next(folder for folder in folders if resolved.count(folder.resolve()) > 1)


def _curves(lines: list[Record]) -> dict[str, Curve]:
    lines = _in_order(lines)
    training = [
        line for line in lines if "loss" in line and math.isfinite(to_number(line.get("target_tokens")))
    ]
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
        seen = np.interp(at, [0, *steps], [0, *tokens]) if len(at) else at
        for name in ("nll", "perplexity", "bleu", "chrf", "auc"):
            values = _column([line["validation"] for line in validations], name)
            best = np.min if name in ("nll", "perplexity") else np.max
            curves[f"validation_{name}"] = _downsampled(Curve(at, seen, hours, values), best)
    return curves


def _in_order(lines: list[Record]) -> list[Record]:
    """The lines that say where on the axes they are, by step. Each axis has to increase."""
    axes = ("step", "seconds")
    lines = [line for line in lines if all(math.isfinite(to_number(line.get(axis))) for axis in axes)]
    return sorted(lines, key=lambda line: to_number(line["step"]))


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


def _first_sources(data: Path) -> list[str]:
    """The sources of the first validation pairs of a data folder."""
    pairs: list[Any] = []
    with reading(data / VALIDATION):
        lines = islice(read_lines(data / VALIDATION), 8)
        pairs = [parse_json(line.decode("utf-8", "replace")) for line in lines]
    return [pair[0] for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str)]


def _column(records: Sequence[Record], name: str) -> Floats:
    """The numbers of a key; NaN for those that are missing, or that JSON cannot express."""
    return np.array([to_number(record.get(name)) for record in records], np.float64)


def config_section(config: Record, name: str) -> Record:
    """A section of a config file, which may be that of an older version; empty if it is missing."""
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def differing_settings(configs: Sequence[Record]) -> dict[str, list[str]]:
    """The config keys, in dotted form, whose values differ between runs, and these values as text. A key that
    a run lacks has an empty value. The run folders, which always differ, are left out."""
    flat = [_flattened(config) for config in configs]
    keys = dict.fromkeys(chain.from_iterable(flat))
    rows = {key: [values.get(key, "") for values in flat] for key in keys if key != "run_dir"}
    return {key: values for key, values in rows.items() if len({*values}) > 1}


def _flattened(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        parts = (_flattened(item, f"{path}.{key}".lstrip(".")) for key, item in value.items())
        return {key: text for part in parts for key, text in part.items()}
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        return _flattened(value[0], path)
    return {path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
