"""Compares the settings and corpora of a run with the inputs that a data folder was made from."""

from pathlib import Path
from typing import Any

from mtrain.config.data import DataConfig
from mtrain.data.reading.raw_files import RawFiles, train_and_validation
from mtrain.data.store.folder import CURE, DataFolder, Inputs
from mtrain.errors import DataError, UsageError
from mtrain.tokenizer.tokenizer import Tokenizer

# Part of the fingerprint. It never changes, so that the same pairs have the same fingerprint in old runs.
_FINGERPRINT_FORMAT = 2

PATHS = ("source", "target", "tsv", "jsonl", "parquet", "hub")  # keys of a corpus

# Rules of `data.filters` that depend on the languages.
_RULES_OF_LANGUAGES = ("min_words", "max_words", "max_word_length", "script", "language")

Settings = dict[str, Any]


def describe_settings(data: DataConfig, tokenizer: Tokenizer, seed: int) -> Settings:
    """The settings that determine the encoded pairs, as `Inputs` contains them."""
    keys = {"train", "validation", "max_length", "bad_lines", "subword_sampling", "filters"}
    return {
        "format": _FINGERPRINT_FORMAT,
        "data": describe_data(data, keys),
        "seed": seed,
        "tokenizer": tokenizer.fingerprint(),
    }


def describe_data(data: DataConfig, keys: set[str] | None = None) -> Settings:
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


def find_difference(before: Settings, now: Settings) -> str | None:
    """The first difference between the settings of a data folder and those of a run that makes the folder
    useless for the run, as the end of a message; None if there is none. The seed, subword sampling and the
    paths of the corpora may differ."""
    old, new = before["data"], now["data"]
    for key in ("max_length", "bad_lines"):
        if old[key] != new[key]:
            return f"data.{key} {old[key]}, not {new[key]}"
    if old.get("filters") != new.get("filters"):
        return "other data.filters"
    if old.get("tags") != new.get("tags"):
        return "other data.language_tags or languages"
    for key in ("train", "validation"):
        if without_paths(old[key]) != without_paths(new[key]):
            return f"another data.{key}"
    return None if before["tokenizer"] == now["tokenizer"] else "another tokenizer"


def require_same_inputs(folder: Path, inputs: Inputs, own: Inputs) -> None:
    """Raise UsageError or DataError that names the first difference between `inputs`, from which a shared
    data folder was made, and the inputs of a run; see `find_difference`."""
    if difference := find_difference(inputs.settings, own.settings):
        raise UsageError(f"{folder}: was prepared with {difference}; {CURE}")
    corpora = corpora_of(own.settings["data"])
    for corpus, before, now in zip(corpora, inputs.contents, own.contents, strict=True):
        if before != now:
            names = " and ".join(str(corpus[key]) for key in PATHS if key in corpus) or "the toy corpus"
            raise DataError(f"{folder}: was prepared from other contents of {names}; {CURE}")


def has_same_text(data: DataConfig, folder: DataFolder, files: RawFiles) -> bool:
    """Whether a data folder was begun from the text of a run. A shared folder must have been, which
    `require_same_inputs` ensures."""
    if folder.inputs is None or folder.shared:
        return folder.inputs is not None
    is_read_alike = _is_read_alike(folder.inputs.settings["data"], describe_data(data))
    return is_read_alike and folder.inputs.contents == files.content_hashes


def has_same_pairs(inputs: Inputs | None, own: Inputs) -> bool:
    """Whether a data folder was begun from the readable pairs of a run, with the same validation pairs."""
    if inputs is None or (inputs.contents, inputs.seed) != (own.contents, own.seed):
        return False
    return _is_read_alike(inputs.settings["data"], own.settings["data"])


def differ_only_in_paths(one: Inputs, other: Inputs) -> bool:
    """Whether two inputs have the same contents and settings, and at most the paths of the corpora differ:
    the raw files were moved."""

    def comparable(inputs: Inputs) -> dict[str, Any]:
        data = inputs.settings["data"]
        corpora = {key: without_paths(data[key]) for key in ("train", "validation")}
        return {**inputs.settings, "data": {**data, **corpora}}

    return one.contents == other.contents and comparable(one) == comparable(other)


def has_same_corpora(old: Settings, new: Settings) -> bool:
    """Whether two data sections describe the same corpora, perhaps with other paths."""
    return all(without_paths(old[key]) == without_paths(new[key]) for key in ("train", "validation"))


def without_paths(corpora: Any) -> Any:
    """The settings of corpora, or of a holdout, without the values of paths."""
    if not isinstance(corpora, list):
        return corpora
    return [{key: key in PATHS or value for key, value in corpus.items()} for corpus in corpora]


def _is_read_alike(old: Settings, new: Settings) -> bool:
    """Whether the same text is read in the same way with two data sections."""
    return has_same_corpora(old, new) and all(
        old.get(key) == new.get(key) for key in ("bad_lines", "filters")
    )
