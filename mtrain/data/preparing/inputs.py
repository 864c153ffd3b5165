"""Compares the corpora and settings of a run with the inputs of a data folder."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtrain.config.corpora import Corpus, HubCorpus, name_of
from mtrain.config.data import DataConfig
from mtrain.data.reading.digests import RawFiles, content_hash, train_and_validation
from mtrain.data.reading.files import files_of
from mtrain.data.reading.lines import Digests
from mtrain.data.store.summary import CURE, Inputs, Summary, find_summary, inputs_of
from mtrain.errors import DataError, UsageError

log = logging.getLogger(__name__)

_PATHS = ("source", "target", "tsv", "jsonl", "parquet", "hub")  # keys of a corpus

# Rules of `data.filters` that depend on the languages.
_RULES_OF_LANGUAGES = ("min_words", "max_words", "max_word_length", "script", "language")


def check_corpora(data: DataConfig, folder: Path | None = None) -> None:
    """Raise DataError if a file that the config names does not exist. If the pairs of all missing files of
    the training and validation corpora are in the data folder `folder`, that is logged instead. Raises also
    what `find_summary` raises."""
    summary, unusable = ({}, None) if folder is None else find_summary(folder, data.folder is not None)
    if summary and not summary.get("complete"):
        unusable = f"{folder}: is not complete"
    in_folder = hashes_of_missing(data, summary)
    for index, (corpus, content) in enumerate(zip(train_and_validation(data), in_folder, strict=True)):
        try:
            if content is None:
                files_of(corpus)
        except DataError as error:
            if unusable is not None:
                raise DataError(f"{unusable}; to encode the corpus, restore its files ({error})") from None
            if path := _other_path(data, summary, index):
                cure = f"without the raw files, give the path that it was prepared from, {path}"
                raise DataError(f"{error}; to use {folder} {cure}") from None
            raise
    if any(in_folder):
        log.info("data: using the pairs in %s without the raw files", folder)
    for name, test in data.test.items():
        try:
            files_of(test)
        except DataError as error:
            if not any(in_folder):
                raise
            log.warning("%s; `mtrain evaluate` needs it for data.test.%s", error, name)


def _other_path(data: DataConfig, summary: Summary, index: int) -> str | None:
    """The path of a corpus when the data folder was prepared, if only paths have changed since; otherwise
    None."""
    if (inputs := inputs_of(summary)) is None:
        return None
    old, new = inputs.settings["data"], describe_data(data)
    if not _has_same_corpora(old, new):
        return None
    before, now = (_corpora_of(settings)[index] for settings in (old, new))
    return next((str(before[key]) for key in _PATHS if key in before and before[key] != now[key]), None)


def hashes_of_missing(data: DataConfig, summary: Summary) -> list[str | None]:
    """The recorded content hash of each training corpus, then of each validation corpus, that the run reads
    from the data folder alone; None for the others.

    These are the corpora whose files are missing and, if the folder is shared, the datasets on the Hugging
    Face Hub, provided that the folder is complete and was made from the same corpora.
    """
    corpora, inputs = train_and_validation(data), inputs_of(summary)
    if not inputs or not summary.get("complete"):
        return [None] * len(corpora)
    if _corpora_of(inputs.settings["data"]) != _corpora_of(describe_data(data)):
        return [None] * len(corpora)
    return [
        content if _is_missing(corpus, data.folder is not None) else None
        for corpus, content in zip(corpora, inputs.contents, strict=True)
    ]


def require_same_inputs(folder: Path, inputs: Inputs, own: Inputs) -> None:
    """Raise an error that names the first difference between `inputs`, from which a shared data folder was
    made, and the inputs of a run. The seed, subword sampling and the paths of the corpora may differ."""
    old, new = inputs.settings["data"], own.settings["data"]
    for key in ("max_length", "bad_lines"):
        if old[key] != new[key]:
            raise UsageError(f"{folder}: was prepared with data.{key} {old[key]}, not {new[key]}; {CURE}")
    if old.get("filters") != new.get("filters"):
        raise UsageError(f"{folder}: was prepared with other data.filters; {CURE}")
    if old.get("tags") != new.get("tags"):
        raise UsageError(f"{folder}: was prepared with other data.language_tags or languages; {CURE}")
    for key in ("train", "validation"):
        if _without_paths(old[key]) != _without_paths(new[key]):
            raise UsageError(f"{folder}: was prepared with another data.{key}; {CURE}")
    if inputs.settings["tokenizer"] != own.settings["tokenizer"]:
        raise UsageError(f"{folder}: was prepared with another tokenizer; {CURE}")
    for corpus, before, now in zip(_corpora_of(new), inputs.contents, own.contents, strict=True):
        if before != now:
            names = " and ".join(str(corpus[key]) for key in _PATHS if key in corpus) or "the toy corpus"
            raise DataError(f"{folder}: was prepared from other contents of {names}; {CURE}")


def require_same_text(
    corpora: Iterable[Corpus], contents: Iterable[str], digests: Digests, problem: str
) -> None:
    """Raise DataError unless the text from which corpora were encoded is there, to solve a problem of the
    data folder. `contents` are the content hashes of that text; `digests` is as in `content_hash`."""
    for corpus, content in zip(corpora, contents, strict=True):
        try:
            same = content_hash(corpus, digests) == content
        except DataError as error:
            raise DataError(f"{problem}; to repair it, restore the corpus ({error})") from None
        if not same:
            reason = f"{name_of(corpus)} has other contents than were encoded"
            raise DataError(f"{problem}; to repair it, restore the corpus ({reason})")


def has_same_text(data: DataConfig, folder: Path, files: RawFiles) -> bool:
    """Whether a data folder was begun from the text of a run. A shared folder must have been, which
    `require_same_inputs` ensures."""
    inputs = inputs_of(find_summary(folder, data.folder is not None)[0])
    if inputs is None or data.folder is not None:
        return inputs is not None
    return _is_same_text(inputs.settings["data"], describe_data(data)) and (
        inputs.contents == files.content_hashes
    )


def has_same_pairs(summary: Summary, own: Inputs) -> bool:
    """Whether a data folder was begun from the readable pairs of a run, with the same validation pairs."""
    inputs = inputs_of(summary)
    if inputs is None or (inputs.contents, inputs.seed) != (own.contents, own.seed):
        return False
    return _is_same_text(inputs.settings["data"], own.settings["data"])


def has_same_settings(inputs: Inputs, settings: dict[str, Any]) -> bool:
    """Whether a data folder was made with the settings of a run, except for what may differ: see
    `require_same_inputs`."""
    old, new = inputs.settings["data"], settings["data"]
    others = all(old.get(key) == new.get(key) for key in ("max_length", "bad_lines", "filters", "tags"))
    return (
        _has_same_corpora(old, new) and others and bool(inputs.settings["tokenizer"] == settings["tokenizer"])
    )


def differ_only_in_paths(one: Inputs, other: Inputs) -> bool:
    """Whether two inputs have the same contents and settings, and at most the paths of the corpora differ:
    the raw files were moved."""

    def comparable(inputs: Inputs) -> dict[str, Any]:
        data = inputs.settings["data"]
        corpora = {key: _without_paths(data[key]) for key in ("train", "validation")}
        return {**inputs.settings, "data": {**data, **corpora}}

    return one.contents == other.contents and comparable(one) == comparable(other)


def _is_same_text(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether the settings agree that the text, which has the same contents, is read in the same way."""
    return _has_same_corpora(old, new) and all(
        old.get(key) == new.get(key) for key in ("bad_lines", "filters")
    )


def describe_data(data: DataConfig, keys: set[str] | None = None) -> dict[str, Any]:
    """Some keys of the data section, by default all, without what does not change the encoded pairs."""
    settings = data.model_dump(
        mode="json", include=keys, exclude={"stages": True, "train": {"__all__": {"weight"}}}
    )
    # Only what is given, so that data folders made before there were filters keep their fingerprint.
    del settings["filters"]
    if data.filters:
        settings["filters"] = data.filters.model_dump(mode="json", exclude_defaults=True)
        depends = any(settings["filters"].get(rule) for rule in _RULES_OF_LANGUAGES)
        if depends or any(corpus.source_lang or corpus.target_lang for corpus in data.train):
            settings["filters"]["languages"] = [*map(str, data.directions)]
    if data.language_tags != "none":
        settings["tags"] = [data.tag_of(corpus) for corpus in train_and_validation(data)]
    for corpus in _corpora_of(settings):
        del corpus["source_lang"], corpus["target_lang"]  # what matters of them is above
        del corpus["name"]
        if corpus["filters"] is None or "filters" not in settings:
            del corpus["filters"]
    return settings


def _corpora_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of the training corpora, then of the validation corpora."""
    validation = settings["validation"]
    return [*settings["train"], *(validation if isinstance(validation, list) else ())]


def _has_same_corpora(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two configs describe the same corpora, perhaps with other paths."""
    return all(_without_paths(old[key]) == _without_paths(new[key]) for key in ("train", "validation"))


def _without_paths(corpora: Any) -> Any:
    if not isinstance(corpora, list):  # a holdout
        return corpora
    return [{key: key in _PATHS or value for key, value in corpus.items()} for corpus in corpora]


def _is_missing(corpus: Corpus, shared: bool) -> bool:
    try:
        return not files_of(corpus) and isinstance(corpus, HubCorpus) and shared
    except DataError:
        return True
