"""Runs whose raw files are missing: a complete data folder contains their pairs."""

import logging

from mtrain.config.sections.corpora import Corpus, HubCorpus
from mtrain.config.sections.data import DataConfig
from mtrain.data.preparing.inputs import PATHS, agree, corpora_of, describe_data
from mtrain.data.reading.digests import train_and_validation
from mtrain.data.reading.files import files_of
from mtrain.data.store.folder import DataFolder
from mtrain.errors import DataError

log = logging.getLogger(__name__)


def check_corpora(data: DataConfig, folder: DataFolder | None = None) -> None:
    """Raise DataError if a file that the config names does not exist. If the pairs of all missing files of
    the training and validation corpora are in the data folder, that is logged instead."""
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
    for name, test in data.test.items():
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
    """The recorded content hash of each training corpus, then of each validation corpus, that the run reads
    from the data folder alone; None for the others.

    These are the corpora whose files are missing and, if the folder is shared, the datasets on the Hugging
    Face Hub, provided that the folder is complete and was made from the same corpora.
    """
    corpora, inputs = train_and_validation(data), folder.inputs
    if not inputs or not folder.is_complete:
        return [None] * len(corpora)
    if corpora_of(inputs.settings["data"]) != corpora_of(describe_data(data)):
        return [None] * len(corpora)
    return [
        content if _is_missing(corpus, folder.shared) else None
        for corpus, content in zip(corpora, inputs.contents, strict=True)
    ]


def _is_missing(corpus: Corpus, shared: bool) -> bool:
    try:
        return not files_of(corpus) and isinstance(corpus, HubCorpus) and shared
    except DataError:
        return True
