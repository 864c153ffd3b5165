"""What a run folder records, as the report needs it. Missing or damaged files are named, and not fatal."""

import json
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from mtrain.checkpoint.model_info import is_run
from mtrain.config.yaml_io import read_yaml_file
from mtrain.data.preparing.check_report import RecordedFindings, read_findings
from mtrain.data.store.folder import VALIDATION, locate_data_folder, read_summary
from mtrain.errors import ModelError, MtrainError, UsageError
from mtrain.regular_files import read_file, read_lines
from mtrain.runs.json_records import Record, leaves, parse_json, reading, to_number
from mtrain.runs.metrics import Curve, read_curves, read_metrics
from mtrain.runs.results import Result, read_results

log = logging.getLogger(__name__)


class Sentence(BaseModel):
    """A validation sentence and its translation."""

    source: str
    reference: str
    translation: str
    target_lang: str | None = None  # None: that of the run, or its tag is in the source


class Translations(BaseModel):
    """Translations at one step."""

    step: int
    sentences: Annotated[list[Sentence], Field(min_length=1)]


class RunRecords(NamedTuple):
    """The records of a run."""

    name: str
    folder: Path
    config: Record
    curves: dict[str, Curve]  # by metric; validation metrics begin with `validation_`
    skipped_steps: int  # whose loss or gradient was not finite
    samples: list[Translations]  # of each validation
    best: Translations | None  # by the best model
    findings: RecordedFindings | None  # of the data check
    summary: Record  # of the data folder; empty if unknown
    examples: list[str]  # validation sources, for attention maps
    results: list[Result]  # of the best model on its test sets
    missing: list[str]  # what the report lacks

    @property
    def is_classifier(self) -> bool:
        """Whether the model is a pair classifier, which does not translate."""
        return _is_of_classifier(self.config)


def _is_of_classifier(config: Record) -> bool:
    return config_section(config, "model").get("head") == "pair_classifier"


def read_run(folder: Path, name: str) -> RunRecords:
    """Read the records of a run folder. Raises ModelError if it is not one, UsageError if it has no steps."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: {'not a folder' if folder.exists() else 'no such run folder'}")
    lost = [name for name in ("config.yaml", "metrics.jsonl") if not (folder / name).exists()]
    if lost and is_run(folder):
        raise ModelError(f"{folder / lost[0]}: missing; restore it to make a report")
    if lost:
        problem = "it has no config.yaml or no metrics.jsonl; give the run_dir of a training"
        raise ModelError(f"{folder}: not a run folder: {problem}")
    config = read_yaml_file(folder / "config.yaml", ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{folder}/config.yaml: damaged: it has no keys; restore it")
    lines = list(read_metrics(folder))
    curves = read_curves(lines)
    if not curves:
        raise UsageError(
            f"{folder}/metrics.jsonl: has no steps yet; train the run first, or set training.log_every lower"
        )
    samples, best = _read_samples(folder / "samples.jsonl"), _read_best(folder / "best_validation.json")
    named = config_section(config, "data").get("folder")
    data = locate_data_folder(folder, None if named is None else str(named))
    findings = read_findings(data)
    summary: Record = {}
    with suppress(MtrainError):
        summary = read_summary(data)
    translates = not _is_of_classifier(config)
    absent = {
        "the findings of the data check (check.json)": findings is None,
        "validation samples (samples.jsonl)": translates and not samples,
        "the translations of the validation set (best_validation.json)": translates and best is None,
        "the model": not (folder / "model").is_dir(),
    }
    missing = [what for what, is_missing in absent.items() if is_missing]
    recorded = samples[-1] if samples else best
    examples = _own_sources(recorded, config) if recorded else _first_sources(data)
    skipped = filter(math.isfinite, (to_number(line.get("skipped_steps")) for line in lines))
    return RunRecords(
        name=name,
        folder=folder,
        config=config,
        curves=curves,
        skipped_steps=int(max(skipped, default=0)),
        samples=samples,
        best=best,
        findings=findings,
        summary=summary,
        examples=examples,
        results=read_results(folder),
        missing=missing,
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """For each run folder, the shortest end of its path that distinguishes it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    for folder, path in zip(folders, parts, strict=True):
        if parts.count(path) > 1:
            raise UsageError(f"{folder}: given twice; give each run once")
    names = []
    for path in parts:
        length = next(n for n in range(1, len(path) + 1) if [p[-n:] for p in parts].count(path[-n:]) == 1)
        names.append(Path(*path[-length:]).as_posix())
    return names


def _read_samples(file: Path) -> list[Translations]:
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


def _read_best(file: Path) -> Translations | None:
    """The translations of the validation set by the best model; None if they are missing or, with a warning,
    if they are damaged."""
    with reading(file):
        record = _parsed(read_file(file))
        if record is None:
            log.warning("%s: damaged; it is left out of the report", file)
        return record
    return None


def _parsed(text: bytes) -> Translations | None:
    with suppress(ValueError):
        return Translations.model_validate_json(text)
    return None


def _own_sources(recorded: Translations, config: Record) -> list[str]:
    """The sources of some translations. With codes of languages, which are not in the text, only those that
    are translated into the target language of the run."""
    section = config_section(config, "data")
    has_codes, target = str(section.get("language_tags")).startswith("codes"), section.get("target_lang")
    return [each.source for each in recorded.sentences if not has_codes or each.target_lang in (None, target)]


def _first_sources(data: Path) -> list[str]:
    """The sources of the first validation pairs of a data folder."""
    pairs: list[Any] = []
    with reading(data / VALIDATION):
        lines = islice(read_lines(data / VALIDATION), 8)
        pairs = [parse_json(line.decode("utf-8", "replace")) for line in lines]
    found = [pair[0] for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str)]
    return [text.encode("utf-8", "replace").decode() for text in found]  # JSON may have unpaired surrogates


def config_section(config: Record, name: str) -> Record:
    """A section of a config file, which may come from an older version; empty if it is missing."""
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def differing_settings(configs: Sequence[Record]) -> dict[str, list[str]]:
    """The config keys, in dotted form, whose values differ between runs, and these values as text. A key that
    a run lacks has an empty value. The run folders, which always differ, are left out."""
    flat = [{key: _shown(value) for key, value in leaves(config)} for config in configs]
    keys = dict.fromkeys(chain.from_iterable(flat))
    rows = {key: [values.get(key, "") for values in flat] for key in keys if key != "run_dir"}
    return {key: values for key, values in rows.items() if len({*values}) > 1}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
