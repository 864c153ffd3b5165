"""Compares the corpora and settings of a run with those that a data folder was made from."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain.config.corpora import Corpus, HubCorpus
from mtrain.config.data import DataConfig
from mtrain.data.corpus_files import files_of
from mtrain.data.scan import train_and_validation
from mtrain.data.summary import Inputs, inputs_of, read_summary
from mtrain.errors import DataError, ModelError, UsageError

log = logging.getLogger(__name__)

CURE = "restore it, or give another data.folder"
_PATHS = ("source", "target", "tsv", "jsonl", "parquet", "hub")  # keys of a corpus


def hashes_of_missing(data: DataConfig, folder: Path) -> list[str | None]:
    """For each training corpus, then each validation corpus: its content hash if its files are missing, but
    its pairs are in the complete data folder `folder`; else None. Datasets on the Hugging Face Hub count as
    missing if the folder is shared."""
    corpora = train_and_validation(data)
    with suppress(ModelError):
        summary = read_summary(folder)
        inputs = inputs_of(summary)
        recorded = inputs and _corpora_of(inputs.settings["data"])
        if summary.get("complete") and inputs and recorded == _corpora_of(_settings_of(data)):
            return [
                content if _is_missing(corpus, data.folder is not None) else None
                for corpus, content in zip(corpora, inputs.contents, strict=True)
            ]
    return [None] * len(corpora)


def check_corpora(data: DataConfig, folder: Path | None = None) -> None:
    """Raise DataError if a file that the config names does not exist. If the pairs of all missing files of
    the training and validation corpora are in the data folder `folder`, that is logged instead."""
    corpora = train_and_validation(data)
    known = [None] * len(corpora) if folder is None else hashes_of_missing(data, folder)
    for corpus, content in zip(corpora, known, strict=True):
        if content is None:
            files_of(corpus)
    if any(known):
        log.info("data: using the pairs in %s without the raw files", folder)
    for name, test in data.test.items():
        try:
            files_of(test)
        except DataError as error:
            if not any(known):
                raise
            log.warning("%s; `mtrain evaluate` needs it for data.test.%s", error, name)


def require_same_inputs(folder: Path, recorded: Inputs, inputs: Inputs) -> None:
    """Raise an error that names the first difference between the inputs of a shared data folder and those of
    a run. The seed, subword sampling and the paths of the corpora may differ."""
    old, new = recorded.settings["data"], inputs.settings["data"]
    for key in ("max_length", "bad_lines"):
        if old[key] != new[key]:
            raise UsageError(f"{folder}: was prepared with data.{key} {old[key]}, not {new[key]}; {CURE}")
    for key in ("train", "validation"):
        if _without_paths(old[key]) != _without_paths(new[key]):
            raise UsageError(f"{folder}: was prepared with another data.{key}; {CURE}")
    if recorded.settings["tokenizer"] != inputs.settings["tokenizer"]:
        raise UsageError(f"{folder}: was prepared with another tokenizer; {CURE}")
    for corpus, before, now in zip(_corpora_of(new), recorded.contents, inputs.contents, strict=True):
        if before != now:
            names = " and ".join(str(corpus[key]) for key in _PATHS if key in corpus) or "the toy corpus"
            raise DataError(f"{folder}: was prepared from other contents of {names}; {CURE}")


def has_same_settings(recorded: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether the settings of `Inputs` agree, except for what may differ: see `require_same_inputs`."""
    old, new = recorded["data"], settings["data"]
    corpora = all(_without_paths(old[key]) == _without_paths(new[key]) for key in ("train", "validation"))
    lengths = all(old[key] == new[key] for key in ("max_length", "bad_lines"))
    return corpora and lengths and bool(recorded["tokenizer"] == settings["tokenizer"])


def _settings_of(data: DataConfig) -> dict[str, Any]:
    return data.model_dump(mode="json", exclude={"train": {"__all__": {"weight"}}})


def _corpora_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of the training corpora, then of the validation corpora."""
    validation = settings["validation"]
    return [*settings["train"], *(validation if isinstance(validation, list) else ())]


def _without_paths(corpora: Any) -> Any:
    if not isinstance(corpora, list):  # a holdout
        return corpora
    return [{key: key in _PATHS or value for key, value in corpus.items()} for corpus in corpora]


def _is_missing(corpus: Corpus, shared: bool) -> bool:
    try:
        return not files_of(corpus) and isinstance(corpus, HubCorpus) and shared
    except DataError:
        return True
