"""`mtrain import`: model folders from models of Hugging Face Transformers: MarianMT, M2M-100 (Fan et al.,
"Beyond English-Centric Multilingual Machine Translation", JMLR 2021), NLLB-200 (NLLB Team, "No Language Left
Behind", 2022), and exports of mtrain; and from models of the program Marian."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mtrain.checkpoint.model_card import stated_license, write_card
from mtrain.checkpoint.model_info import Ancestor, Origin, describe_ancestor, name_of, new_info, write_info
from mtrain.config.load import validate, with_overrides
from mtrain.config.schema import ModelFolderConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.config.yaml_io import to_yaml
from mtrain.decoding.search.constraints import check_forbidden_ids
from mtrain.errors import ModelError
from mtrain.interop.bergamot.read import Converted, convert_native, native_weights
from mtrain.interop.generation_config import decoding_from_generation
from mtrain.interop.huggingface import read_config, read_object, read_weights, source_folder
from mtrain.interop.m2m_100_tokenizer import ImportedTokenizer, take_tokenizer, write_languages
from mtrain.interop.marian import architecture, take_marian_tokenizer, with_defaults
from mtrain.interop.marian_tensors import EMBEDDINGS, from_transformers, positions_in, without_last_token
from mtrain.paths import path_of
from mtrain.regular_files import MAX_JSON_BYTES, read_file
from mtrain.storage.atomic import require_new_folder, write_new_folder, write_text
from mtrain.storage.manifest import CARD

log = logging.getLogger(__name__)

_LICENSE_OF_NLLB = "cc-by-nc-4.0"  # unless the card in the folder states another one


def import_model(source: str, out: Path, overrides: Sequence[str] = ()) -> None:
    """Create a model folder from a model in a folder or on the Hugging Face Hub.

    `overrides` set `decoding.*`, `source_lang`, `target_lang` and, of models with codes of languages,
    `normalizes_punctuation`. Raises ModelError if something is missing, damaged or unsupported, and
    UsageError if `out` exists, StorageError if it cannot be written.
    """
    require_new_folder(out)
    folder = source_folder(source)
    native = native_weights(folder)

    def fill(temporary: Path) -> None:
        convert = _convert if native is None else convert_native
        tensors, settled, tokenizer = convert(native or folder, temporary / "tokenizer", source)
        changed = _with_overrides(settled, overrides)
        completed = tokenizer.tokenizer.complete(changed.direction, changed.language_tags)
        languages = {"source_lang": completed.source, "target_lang": completed.target}
        changed = changed.model_copy(update=languages)
        if changed.languages:
            codes = tokenizer.tokenizer.source.codes
            write_languages(temporary / "tokenizer", codes, changed.normalizes_punctuation)
        elif "und" in (changed.source_lang, changed.target_lang):
            advice = "set them with --set source_lang=... --set target_lang=..."
            log.warning("%s: unknown languages; %s", folder, advice)
        write_text(temporary / "config.yaml", to_yaml(changed))
        save_file(tensors, temporary / "model.safetensors")
        on_hub = not path_of(source).exists()
        original = Ancestor(name=source, hub=True) if on_hub else describe_ancestor(folder)
        license_ = _stated_license(folder) or (_LICENSE_OF_NLLB if tokenizer.is_nllb else None)
        origin = Origin(kind="imported", ancestors=[original], license=license_)
        write_info(temporary, new_info(name_of(out), origin))
        write_card(temporary)

    write_new_folder(out, fill)


def _convert(folder: Path, into: Path, source: str) -> Converted:
    """Like `convert_native`, for a model of Transformers in a folder."""
    config = with_defaults(read_config(folder))
    names = read_object(folder / "tokenizer_config.json", optional=True)
    file, theirs = read_weights(folder)
    if config["model_type"] == "m2m_100":
        rows = [len(tensor) for name, tensor in theirs.items() if name in EMBEDDINGS and tensor.dim()]
        if (size := config.get("vocab_size")) not in rows:
            raise ModelError(f"{file}: the vocab_size of config.json is {size!r}, but embeddings have {rows}")
        imported = take_tokenizer(folder, into, size)
    else:
        separate = bool(names.get("separate_vocabs"))
        imported = ImportedTokenizer(take_marian_tokenizer(folder, into, config, separate, theirs))
    tokenizer, sizes = imported.tokenizer, config
    if tokenizer.source.ids is None and config.get("vocab_size") == len(tokenizer.source) + 1:
        theirs = without_last_token(theirs)
        sizes = config | dict.fromkeys(("vocab_size", "decoder_vocab_size"), len(tokenizer.source))
        sizes["decoder_start_token_id"] = tokenizer.special.bos
    model = architecture(sizes, tokenizer)
    if config["model_type"] == "pegasus":
        model = model.model_copy(update={"positions": positions_in(theirs, model)})
    tensors, model = from_transformers(theirs, config, model, file)
    limit, positions = names.get("model_max_length"), model.max_positions
    raw = {
        **_languages(names, imported),
        "max_length": min(limit, positions) if isinstance(limit, int) and limit >= 2 else positions,
        "tokenizer": {
            **{"vocab_size": len(tokenizer.source), "joint": tokenizer.joint, "path": source},
            "symbols": [] if tokenizer.source.ids else tokenizer.source.symbol_names,
        },
        "model": model.model_dump(mode="json"),
        "decoding": _decoding(folder, config, model, imported),
    }
    settled = validate(ModelFolderConfig, raw, source, ModelError)
    if (highest := max(settled.decoding.forbidden_ids, default=0)) >= model.target_vocab_size:
        raise ModelError(f"generation settings: bad_words_ids: {highest} is not a token id of this model")
    return tensors, settled, imported


def _stated_license(folder: Path) -> str | None:
    """The license in the card of a folder, if it has a readable one. It may be a link, as in the cache of
    the Hub."""
    with suppress(OSError, ModelError):
        return stated_license(read_file(folder / CARD, MAX_JSON_BYTES).decode("utf-8", "replace"))
    return None


def _with_overrides(config: ModelFolderConfig, overrides: Sequence[str]) -> ModelFolderConfig:
    """The config with other decoding settings, languages and normalization."""
    keys = ["source_lang", "target_lang", *(["normalizes_punctuation"] if config.languages else [])]
    known = f"decoding.*, {', '.join(keys[:-1])} and {keys[-1]}"
    changed = with_overrides(config, overrides, "decoding.", *(f"{key}=" for key in keys), known=known)
    check_forbidden_ids(changed.decoding, changed.model.target_vocab_size)
    return changed


def _languages(names: dict[str, Any], imported: ImportedTokenizer) -> dict[str, Any]:
    """The raw keys of a model folder for languages, from tokenizer_config.json."""
    codes = imported.tokenizer.source.codes
    if not codes:
        defaults = {"source_lang": "und", "target_lang": "und", "language_tags": "none"}
        return {key: names.get(key) or default for key, default in defaults.items()}
    given = names.get("src_lang"), names.get("tgt_lang")
    source, target = (code if code in [*codes] else "und" for code in given)
    return {
        "source_lang": source,
        "target_lang": target,
        "language_tags": "codes_last" if names.get("legacy_behaviour") else "codes",
        "languages": [*codes],
        "normalizes_punctuation": names.get("normalizes_punctuation", imported.is_nllb),
    }


def _decoding(
    folder: Path, config: dict[str, Any], model: ModelConfig, imported: ImportedTokenizer
) -> dict[str, Any]:
    """The raw `decoding` section, from generation_config.json or, for older models, from config.json."""
    has_codes = bool(imported.tokenizer.source.codes)
    generation = read_object(folder / "generation_config.json", optional=True)
    if not generation:  # the defaults of MarianConfig and M2M100Config differ
        generation = {"forced_eos_token_id": None if has_codes else model.eos_id, **config}
    starts = generation.get("decoder_start_token_id")
    if starts not in (None, config["decoder_start_token_id"]):
        raise ModelError(f"generation settings: decoder_start_token_id is {starts!r}; config.json differs")
    if not has_codes:
        return decoding_from_generation(generation, model.eos_id, model.max_positions)
    generation.pop("forced_bos_token_id", None)  # the code of a target language, which users choose
    decoding = decoding_from_generation(generation, model.eos_id, model.max_positions)
    decoding["forbidden_ids"] = sorted({*decoding["forbidden_ids"], *imported.unused})
    decoding["max_length_offset"] -= 1  # the code of the target is added
    return decoding
