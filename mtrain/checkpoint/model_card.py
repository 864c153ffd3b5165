"""The model card: `README.md` of a model folder or an exported model, with the metadata block of the Hugging
Face Hub.

It is generated from the settings and info.json. A card that somebody has edited is never overwritten.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mtrain.checkpoint.card_text import LIBRARIES, model_card, model_usage
from mtrain.checkpoint.model_info import (
    ExportInfo,
    ModelInfo,
    Score,
    describe_model,
    name_of,
    read_info,
    read_known_info,
    write_info,
)
from mtrain.config.yaml_io import YamlError, parse_yaml
from mtrain.errors import ModelError
from mtrain.regular_files import MAX_JSON_BYTES, read_file
from mtrain.storage.atomic import write_atomically
from mtrain.storage.generated import is_unedited, marked
from mtrain.storage.manifest import CARD

log = logging.getLogger(__name__)

# As on the Hub, except that the block is small.
_METADATA = re.compile(r"\A\ufeff?\s*---\r?\n(.{0,100000}?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
_OWN_LIBRARY = re.compile(r"^library_name: mtrain(?=[ \t]*\r?$)", re.MULTILINE)


def write_card(folder: Path) -> None:
    """Write the card of a model folder, unless somebody has edited it. Raises StorageError."""
    file = folder / CARD
    if os.path.lexists(file) and not is_unedited(file):
        return
    try:
        text = model_card(describe_model(folder))
    except Exception as error:  # the model can be used without it, and training can continue
        log.warning("%s: the model card could not be generated: %s", folder, error)
    else:
        write_atomically(file, marked(text))


def record_test_scores(folder: Path, scores: Sequence[Score]) -> None:
    """Replace the scores on test sets in info.json, and in the card unless somebody has edited it. Raises
    ModelError if info.json is damaged, StorageError if a file cannot be written."""
    info = read_info(folder)
    updated = [*(score for score in info.scores if score.split != "test"), *scores]
    if updated != info.scores:
        write_info(folder, info.model_copy(update={"scores": updated}))
        write_card(folder)


def write_exported_card(model: Path, folder: Path, export: ExportInfo) -> None:
    """Write info.json and the card of an exported model. An edited card in the `model` folder is copied, with
    a section on how to load the exported model. Raises StorageError."""
    info, card = ModelInfo(), None
    try:
        info = read_known_info(model)
    except ModelError as error:
        log.warning("%s; the exported model lacks its facts", error)
    try:
        card = None if is_unedited(model / CARD) else read_card(model)
    except ModelError as error:
        log.warning("%s; the exported model gets a generated card", error)
    write_info(folder, info.model_copy(update={"name": info.name or name_of(model), "export": export}))
    if card is None:
        write_card(folder)
        return
    library, _ = LIBRARIES[export.format]
    card = _METADATA.sub(lambda block: _OWN_LIBRARY.sub(f"library_name: {library}", block[0]), card)
    usage = model_usage(describe_model(folder))
    write_atomically(folder / CARD, f"{card.rstrip()}\n\n## Use with {library}\n\n{usage}")
    log.info("%s was edited; the exported model has a copy, with a section on %s", model / CARD, library)


def read_card(folder: Path) -> str | None:
    """The text of a card; None if the folder has none. Raises ModelError if it cannot be read."""
    file = folder / CARD
    if not os.path.lexists(file):
        return None
    try:
        # A link could make `mtrain export` publish another file.
        if file.is_symlink():
            raise ModelError(f"{file}: not a regular file")
        return read_file(file, MAX_JSON_BYTES).decode("utf-8")
    except OSError as error:
        raise ModelError(f"{file}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelError(f"{file}: not valid UTF-8") from None


def stated_license(card: str) -> str | None:
    """The license in the metadata block of a card; None if there is none. Raises ModelError if the block is
    not valid YAML."""
    block = _METADATA.match(card)
    try:
        metadata = parse_yaml(block[1]) if block else None
    except YamlError as error:
        raise ModelError(f"{CARD}: the metadata block is not valid YAML: {error}") from None
    found = metadata.get("license") if isinstance(metadata, dict) else None
    return found if isinstance(found, str) else None
