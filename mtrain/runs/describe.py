"""What a run folder records about its model: how it was trained, on which data, and its scores.

Missing and damaged files are left out; older versions did not write all of them.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtrain.checkpoint import model_info
from mtrain.checkpoint.model_info import CorpusInfo, DataInfo, ModelInfo, TrainingInfo
from mtrain.config.schema import Config
from mtrain.data.store.folder import VALIDATION, inputs_of, locate_data_folder, read_summary
from mtrain.errors import ModelError
from mtrain.regular_files import read_lines
from mtrain.runs.json_records import read_record
from mtrain.runs.metrics import read_metrics, validation_scores


def describe_run(run_dir: Path, config: Config, step: int) -> ModelInfo:
    """What the run folder records about the model at `step`, a checkpoint that was validated. The scores on
    test sets are not included."""
    data = locate_data_folder(run_dir, config.data.folder)
    scores = validation_scores(read_metrics(run_dir)).get(step, [])
    sentences = _count_lines(data / VALIDATION)
    if sentences is not None and config.training.validation_pairs is not None:
        sentences = min(sentences, config.training.validation_pairs)
    return model_info.new_info(
        model_info.name_of(run_dir),
        model_info.Origin(kind="trained", ancestors=model_info.ancestors_of_run(run_dir)),
        training=_training(run_dir, step),
        data=describe_data(data),
        scores=[score.model_copy(update={"sentences": sentences}) for score in scores],
    )


def _count_lines(file: Path) -> int | None:
    """The number of lines of a file; None if it is missing or cannot be read."""
    with suppress(OSError):
        return sum(1 for _ in read_lines(file))
    return None


def _training(run_dir: Path, step: int) -> TrainingInfo | None:
    state = read_record(run_dir / "checkpoints" / f"step-{step:08d}" / "state.json") or {}
    values = {"epochs": state.get("epoch"), "target_tokens": state.get("target_tokens_seen")}
    with suppress(ValidationError):
        return TrainingInfo(steps=step, seconds=state.get("seconds"), **values)
    return TrainingInfo(steps=step)


def describe_data(folder: Path) -> DataInfo | None:
    """What the summary of a data folder says about its corpora; None if there is no usable summary."""
    with suppress(ModelError, ValidationError, LookupError, TypeError, AttributeError):
        summary = read_summary(folder)
        inputs = inputs_of(summary)
        if inputs is None:
            return None
        corpora = inputs.settings["data"]
        train, held = corpora["train"], corpora["validation"]
        kept = summary.get("kept") or [None] * len(train)  # unknown until the encoding is complete
        trained = [_corpus(*each) for each in zip(train, inputs.contents, kept, strict=False)]
        if isinstance(held, dict):
            name = "held out of the training corpora"
            validation = [CorpusInfo(name=name, pairs=_count_lines(folder / VALIDATION))]
        else:
            validation = [*map(_corpus, held, inputs.contents[len(train) :])]
        return DataInfo(fingerprint=inputs.fingerprint, train=trained, validation=validation)
    return None


def _corpus(corpus: dict[str, Any], sha256: str, pairs: int | None = None) -> CorpusInfo:
    hub = corpus.get("hub")
    hub = hub if isinstance(hub, str) and not Path(hub).exists() else None
    return CorpusInfo(name=_name(corpus, hub), pairs=pairs, sha256=sha256, hub=hub)


def _name(corpus: dict[str, Any], hub: str | None) -> str:
    """What a corpus is called. Files are named without their folders, since the name may be published."""
    if "toy" in corpus:
        return f"toy corpus of mtrain, {corpus['toy']}"
    if "sacrebleu" in corpus:
        return f"{corpus['sacrebleu']} {corpus['langs']} of sacreBLEU"
    if hub is not None:
        more = (corpus.get(key) for key in ("config", "split", "revision"))
        return " ".join([hub, *filter(None, more)])
    files = (corpus[key] for key in ("source", "target", "tsv", "jsonl", "parquet", "hub") if key in corpus)
    return " and ".join(Path(file).name for file in files)
