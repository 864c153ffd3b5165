"""Export to the format of the Bergamot engine, for Firefox, translateLocally and web pages."""

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from mtrain.checkpoint.model_folder import LoadedModel
from mtrain.config.language_names import language_name
from mtrain.config.languages import base_language
from mtrain.config.schema import ModelFolderConfig
from mtrain.errors import ModelError
from mtrain.interop.bergamot.heads import choose_head, with_head_first
from mtrain.interop.bergamot.names import options_of, to_native
from mtrain.interop.bergamot.weights import write_binary
from mtrain.interop.marian_tensors import BIAS, NEVER, renamed, with_more_tokens, with_zero_start
from mtrain.storage.atomic import write_text
from mtrain.tokenizer.model_file import with_control_pieces

MODEL = "model.bin"
VOCABULARIES = {True: ["vocab.spm"], False: ["srcvocab.spm", "trgvocab.spm"]}  # by whether they are joint
CONFIG, DESCRIPTION = "config.intgemm8bitalpha.yml", "model_info.json"  # the names in translateLocally
MAX_TOKENS = 128  # of a sentence; the engine splits longer ones
_MULTIPLE = 8  # of the vocabulary: products in int8 need such a number of columns


def write_bergamot(loaded: LoadedModel, folder: Path, int8: bool, rows: Sequence[list[int]]) -> None:
    """Write a model to an empty folder, with its vocabularies and settings. The attention head for word
    alignments is chosen on `rows`, lists of source ids.

    Raises ModelError if the languages are unknown.
    """
    languages_of(loaded.config)
    model, tokenizer = loaded.model.config, loaded.tokenizer
    sides = {"source": tokenizer.source, "target": tokenizer.target}
    sizes = {side: -(-len(vocabulary) // _MULTIPLE) * _MULTIPLE for side, vocabulary in sides.items()}
    for name, side in zip(VOCABULARIES[tokenizer.joint], sides, strict=False):
        processor = sides[side].processor
        unused = [f"<unused {i}>" for i in range(len(processor), sizes[side])]
        (folder / name).write_bytes(with_control_pieces(processor.serialized_model_proto(), unused))
    layer, head = choose_head(loaded, rows)
    tensors = with_head_first(loaded.model.state_dict(), layer, head, model.heads)
    added = {side: sizes[side] - len(vocabulary) for side, vocabulary in sides.items()}
    theirs = with_more_tokens(renamed(model, with_zero_start(model, tensors)), **added)
    theirs[BIAS][:, loaded.config.decoding.forbidden_ids] = NEVER
    padded = {f"{side}_vocab_size": size for side, size in sizes.items()}
    options = options_of(model.model_copy(update=padded), layer)
    write_binary(folder / MODEL, to_native(theirs), options, int8)
    _write_settings(loaded, folder, int8)


def vocabularies_in(folder: Path) -> list[str]:
    """The names of the vocabularies in the folder of an export."""
    return next(names for names in VOCABULARIES.values() if (folder / names[0]).exists())


def languages_of(config: ModelFolderConfig) -> tuple[str, str]:
    """The codes of the languages of a model, which become parts of the names of files. Raises ModelError if
    they are unknown or unusual."""
    codes = config.source_lang, config.target_lang
    if "und" in codes or not all(re.fullmatch(r"[\w-]+", code, re.ASCII) for code in codes):
        cure = "use codes such as de: train with them, or import it again with --set source_lang=..."
        raise ModelError(f"the languages of the model are {codes[0]} and {codes[1]}; {cure}")
    return codes


def arithmetic(int8: bool) -> str:
    """The engine's name of the data type of matrix products."""
    return "int8shiftAll" if int8 else "float32"


def _write_settings(loaded: LoadedModel, folder: Path, int8: bool) -> None:
    """Write what the engine and translateLocally read beside the model."""
    config, vocabularies = loaded.config, VOCABULARIES[loaded.tokenizer.joint]
    settings = {
        "relative-paths": True,
        "models": [MODEL],
        "vocabs": [vocabularies[0], vocabularies[-1]],
        "beam-size": 1,
        "normalize": 1.0,
        "word-penalty": 0,
        "max-length-break": min(MAX_TOKENS, config.max_length),
        "max-length-factor": 2.0,
        "mini-batch-words": 1024,
        "workspace": 128,
        "skip-cost": True,
        "alignment": "soft",
        "gemm-precision": arithmetic(int8),
    }
    (folder / CONFIG).write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
    source, target = map(base_language, languages_of(config))
    described = {
        "shortName": "-".join([*languages_of(config), "mtrain"]),  # a model of the same name is replaced
        "modelName": f"{language_name(source)}-{language_name(target)} mtrain",
        "src": language_name(source),
        "trg": language_name(target),
        "srcTags": {source: language_name(source)},
        "trgTag": target,
        "type": "tiny",  # the type that translateLocally prefers for web pages
        "version": 1,
        "API": 1,
    }
    write_text(folder / DESCRIPTION, json.dumps(described, indent=1, ensure_ascii=False) + "\n")


def name_for_firefox(loaded: LoadedModel, folder: Path) -> None:
    """Replace the model and the vocabularies by compressed files with the names of Firefox's models."""
    pair = "".join(map(base_language, languages_of(loaded.config)))
    # Firefox takes the arithmetic from the name; `intgemm.alphas` would be for calibrated activations.
    names = {MODEL: f"model.{pair}.intgemm8.bin"}
    names |= {name: f"{name.split('.')[0]}.{pair}.spm" for name in VOCABULARIES[loaded.tokenizer.joint]}
    for ours, theirs in names.items():
        (folder / f"{theirs}.gz").write_bytes(gzip.compress((folder / ours).read_bytes(), mtime=0))
        (folder / ours).unlink()
    for name in (CONFIG, DESCRIPTION):
        (folder / name).unlink()
