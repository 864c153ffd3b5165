"""Compares the settings and corpora of a run with the inputs that a data folder was made from.

Runs whose raw files are missing can use a complete data folder, which contains their pairs.
"""

import logging
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from mtrain.config.languages import scripts_of_language
from mtrain.config.sections.corpora import HubCorpus, ToyCorpus
from mtrain.config.sections.data import DataConfig
from mtrain.data.reading.digests import RawFiles, train_and_validation
from mtrain.data.reading.files import existing_files, files_of
from mtrain.data.store.folder import CURE, DataFolder, Inputs
from mtrain.errors import DataError, UsageError
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Part of the fingerprint. It never changes, so that the same pairs have the same fingerprint in old runs.
_FINGERPRINT_FORMAT = 2

PATHS = ("source", "target", "tsv", "jsonl", "parquet", "hub")  # keys of a corpus

# Rules of `data.filters` that depend on the languages.
_RULES_OF_LANGUAGES = ("min_words", "max_words", "max_word_length", "script", "language")

# Keys of the data section that determine how the text is read.
_OF_TEXT = ("train", "validation", "bad_lines", "filters")

Settings = dict[str, Any]


def describe_settings(data: DataConfig, tokenizer: Tokenizer, seed: int) -> Settings:
    """The settings that determine the encoded pairs, as `Inputs` contains them."""
    keys = {"train", "validation", "max_length", "bad_lines", "subword_sampling", "filters"}
    return {
        "format": _FINGERPRINT_FORMAT,
        "data": describe_data(data, keys),
        "seed": seed,
        "tokenizer": tokenizer.fingerprint,
    }


def describe_data(data: DataConfig, keys: set[str] | None = None) -> Settings:
    """Some keys of the data section, by default all, without what does not change the encoded pairs."""
    left_out: dict[str, Any] = {"stages": True, "train": {"__all__": {"weight"}}}
    settings = data.model_dump(mode="json", include=keys, exclude=left_out)
    # Only what is given, so that data folders made before there were filters keep their fingerprint.
    del settings["filters"]
    if data.filters:
        settings["filters"] = data.filters.model_dump(mode="json", exclude_defaults=True)
        depends = any(settings["filters"].get(rule) for rule in _RULES_OF_LANGUAGES)
        if depends or any(corpus.source_lang or corpus.target_lang for corpus in data.train):
            settings["filters"]["languages"] = [*map(str, data.directions)]
    if data.language_tags != "none":
        corpora = train_and_validation(data)
        settings["tags"] = [data.tag_of(corpus) or str(data.direction_of(corpus)) for corpus in corpora]
    for corpus in corpora_of(settings):
        del corpus["source_lang"], corpus["target_lang"]  # what matters of them is above
        del corpus["name"]
        if corpus["filters"] is None or "filters" not in settings:
            del corpus["filters"]
    return settings


def corpora_of(data: Settings) -> list[Settings]:
    """The settings of the training corpora, then of the validation corpora, from the data section."""
    validation = data["validation"]
    return [*data["train"], *(validation if isinstance(validation, list) else ())]


def agree(old: Settings, new: Settings, keys: Iterable[str]) -> bool:
    """Whether two data sections have the same values of some keys, perhaps with other paths of corpora."""
    old, new = _without_paths(old), _without_paths(new)
    return all(old.get(key) == new.get(key) for key in keys)


def _without_paths(data: Settings) -> Settings:
    """The settings of a data section without the values of the paths of corpora."""
    hidden = {
        key: [{name: name in PATHS or value for name, value in corpus.items()} for corpus in data[key]]
        for key in ("train", "validation")
        if isinstance(data[key], list)  # otherwise, it is a holdout
    }
    return {**data, **hidden}


def find_difference(before: Settings, now: Settings) -> str | None:
    """The first difference between the settings of a data folder and a run that makes the folder
    useless for the run, as the end of a message; None if there is none. The seed, subword sampling and the
    paths of the corpora may differ."""
    old, new = ({**_without_paths(each["data"]), "tokenizer": each["tokenizer"]} for each in (before, now))
    differences = {
        "max_length": f"data.max_length {old['max_length']}, not {new['max_length']}",
        "bad_lines": f"data.bad_lines {old['bad_lines']}, not {new['bad_lines']}",
        "filters": "other data.filters",
        "tags": "other data.language_tags or languages",
        "train": "another data.train",
        "validation": "another data.validation",
        "tokenizer": "another tokenizer",
    }
    return next((text for key, text in differences.items() if old.get(key) != new.get(key)), None)


def require_same_inputs(folder: Path, inputs: Inputs, own: Inputs) -> None:
    """Raise UsageError or DataError that names the first difference between `inputs`, from which a shared
    data folder was made, and the inputs of a run; see `find_difference`."""
    if difference := find_difference(inputs.settings, own.settings):
        raise UsageError(f"{folder}: was prepared with {difference}; {CURE}")
    corpora = corpora_of(own.settings["data"])
    for corpus, before, now in zip(corpora, inputs.contents, own.contents, strict=True):
        if before != now:
            keys = (*PATHS, "sacrebleu")
            names = " and ".join(str(corpus[key]) for key in keys if key in corpus) or "the toy corpus"
            raise DataError(f"{folder}: was prepared from other contents of {names}; {CURE}")


def has_same_text(data: DataConfig, folder: DataFolder, files: RawFiles) -> bool:
    """Whether a data folder was begun from the text of a run. A shared folder must have been, which
    `require_same_inputs` ensures."""
    if folder.inputs is None or folder.shared:
        return folder.inputs is not None
    is_read_alike = agree(folder.inputs.settings["data"], describe_data(data), _OF_TEXT)
    return is_read_alike and folder.inputs.contents == files.content_hashes


def has_same_pairs(inputs: Inputs | None, own: Inputs) -> bool:
    """Whether a data folder was begun from the readable pairs of a run, with the same validation pairs."""
    if inputs is None or (inputs.contents, inputs.seed) != (own.contents, own.seed):
        return False
    return agree(inputs.settings["data"], own.settings["data"], (*_OF_TEXT, "tags"))


def differ_only_in_paths(one: Inputs, other: Inputs) -> bool:
    """Whether two inputs have the same contents and settings, and at most the paths of the corpora differ:
    the raw files were moved."""
    settings = [{**each.settings, "data": _without_paths(each.settings["data"])} for each in (one, other)]
    return one.contents == other.contents and settings[0] == settings[1]


def check_corpora(data: DataConfig, folder: DataFolder | None = None, test_sets: bool = True) -> None:
    """Raise DataError if a file that the config names does not exist. If the pairs of all missing files of
    the training and validation corpora are in the data folder, that is logged instead. Without `test_sets`,
    these may be missing, and are not downloaded."""
    for code in dict.fromkeys(chain.from_iterable(data.directions)):
        if len(code) == 2 and not scripts_of_language(code):
            log.warning("language %s is not known; use codes of ISO 639, such as ja for Japanese", code)
    corpora = train_and_validation(data)
    in_folder = [None] * len(corpora) if folder is None else hashes_of_missing(data, folder)
    for index, (corpus, content) in enumerate(zip(corpora, in_folder, strict=True)):
        try:
            if content is None:
                files_of(corpus)
        except DataError as error:
            if folder is not None:
                _explain_missing(data, folder, index, error)
            raise
    if folder is not None and any(in_folder):
        log.info("data: using the pairs in %s without the raw files", folder.path)
    for name, test in data.test.items() if test_sets else ():
        try:
            files_of(test)
        except DataError as error:
            if not any(in_folder):
                raise
            log.warning("%s; `mtrain evaluate` needs it for data.test.%s", error, name)


def _explain_missing(data: DataConfig, folder: DataFolder, index: int, error: DataError) -> None:
    """Raise a DataError that says why the data folder cannot replace the missing files of a corpus, if that
    is known. `error` names the files."""
    problem = folder.unusable
    if problem is None and folder.summary and not folder.is_complete:
        problem = f"{folder.path}: is not complete"
    if problem is not None:
        raise DataError(f"{problem}; to encode the corpus, restore its files ({error})") from None
    if path := _other_path(data, folder, index):
        cure = f"without the raw files, give the path that it was prepared from, {path}"
        raise DataError(f"{error}; to use {folder.path} {cure}") from None


def _other_path(data: DataConfig, folder: DataFolder, index: int) -> str | None:
    """The path of a corpus when the data folder was prepared, if only paths have changed since; otherwise
    None."""
    if folder.inputs is None:
        return None
    old, new = folder.inputs.settings["data"], describe_data(data)
    if not agree(old, new, ("train", "validation")):
        return None
    before, now = corpora_of(old)[index], corpora_of(new)[index]
    return next((str(before[key]) for key in PATHS if key in before and before[key] != now[key]), None)


def hashes_of_missing(data: DataConfig, folder: DataFolder) -> list[str | None]:
    """For each corpus, training first, then validation: its recorded content hash if the run reads it from
    the data folder alone, otherwise None.

    A corpus is read from the folder alone if its files are missing, or if it is a dataset on the Hugging Face
    Hub and the folder is shared. The folder must be complete, and made from the same corpora.
    """
    corpora, inputs = train_and_validation(data), folder.inputs
    if not inputs or not folder.is_complete:
        return [None] * len(corpora)
    if corpora_of(inputs.settings["data"]) != corpora_of(describe_data(data)):
        return [None] * len(corpora)
    without_files: tuple[type, ...] = (ToyCorpus,) if folder.shared else (ToyCorpus, HubCorpus)
    return [
        None if isinstance(corpus, without_files) or existing_files(corpus) else content
        for corpus, content in zip(corpora, inputs.contents, strict=True)
    ]
