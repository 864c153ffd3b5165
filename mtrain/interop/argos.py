"""Export to packages for Argos Translate (github.com/argosopentech/argos-translate), the library of
LibreTranslate: a CTranslate2 model, a SentencePiece model and a description in a ZIP file."""

import json
import zipfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

from mtrain.checkpoint.card_text import argos_package
from mtrain.checkpoint.model_folder import LoadedModel
from mtrain.config.language_names import language_name
from mtrain.config.languages import argos_code
from mtrain.config.schema import ModelFolderConfig
from mtrain.interop.ctranslate2 import write_ctranslate2
from mtrain.storage.atomic import write_text
from mtrain.storage.manifest import CARD, INFO
from mtrain.tokenizer.vocabulary import SPACE

_MODEL = "model"


def write_argos(loaded: LoadedModel, folder: Path, quantization: str | None) -> Path:
    """Write the files of a package to an empty folder. Returns the folder of the CTranslate2 model."""
    config, model = loaded.config, folder / _MODEL
    write_ctranslate2(loaded, model, quantization)
    for file in loaded.tokenizer.files:
        (model / file.name).unlink()
    spm = loaded.tokenizer.source.processor.serialized_model_proto()
    (folder / "sentencepiece.model").write_bytes(spm)
    sides = {"from": config.source_lang, "to": config.target_lang}
    described = {
        # Greater than the versions of public packages, which would otherwise replace this one in an update.
        "package_version": f"{date.today():%Y.%m.%d}",
        "argos_version": "1.10.0",  # the first version that reads byte pieces, and needs no package of Stanza
        **{f"{side}_code": argos_code(language) for side, language in sides.items()},
        **{f"{side}_name": language_name(language) for side, language in sides.items()},
    }
    write_text(folder / "metadata.json", json.dumps(described, indent=1) + "\n")
    return model


def decode_argos(loaded: LoadedModel) -> Callable[[list[int]], str]:
    """How Argos Translate decodes target ids: with the SentencePiece model of the source, which leaves pieces
    that it does not know as they are."""
    source, target = loaded.tokenizer.source.processor, loaded.tokenizer.target.pieces
    return lambda ids: source.decode_pieces([target[i] for i in ids]).replace(SPACE, " ")


def pack_argos(config: ModelFolderConfig, folder: Path) -> None:
    """Move the files of a package, with copies of its card and info.json, to a ZIP file in the same folder.

    The folder in the ZIP file has no version in its name, so that a new version replaces the old one.
    """
    name, files = argos_package(config), [file for file in sorted(folder.rglob("*")) if file.is_file()]
    with zipfile.ZipFile(folder / f"{name}.argosmodel", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, f"{name}/{file.relative_to(folder)}")
    for file in files:
        if file.name not in (CARD, INFO):
            file.unlink()
    (folder / _MODEL).rmdir()
