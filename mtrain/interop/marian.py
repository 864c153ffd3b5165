"""Import from Hugging Face Transformers: MarianMTModel (Junczys-Dowmunt et al., "Marian", ACL 2018),
PegasusForConditionalGeneration as `mtrain export` writes it, and M2M100ForConditionalGeneration: M2M-100 (Fan
et al. 2020) and NLLB-200 (NLLB Team 2022)."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from mtrain.checkpoint.model_card import read_card, stated_license, write_card
from mtrain.checkpoint.model_info import Ancestor, Origin, describe_ancestor, name_of, new_info, write_info
from mtrain.config.load import override, validate
from mtrain.config.schema import ModelFolderConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.config.yaml_io import to_yaml
from mtrain.decoding.search.constraints import check_forbidden_ids
from mtrain.errors import ModelError, UsageError
from mtrain.interop.generation_config import decoding_from_generation
from mtrain.interop.huggingface import read_object, read_weights, source_folder
from mtrain.interop.m2m_100_tokenizer import ImportedTokenizer, take_tokenizer, write_languages
from mtrain.interop.marian_tensors import from_transformers, positions_in, starts_like, without_last_token
from mtrain.paths import path_of
from mtrain.regular_files import read_file
from mtrain.storage.atomic import require_new_folder, write_new_folder, write_text
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)

EQUIVALENT = {  # keys of config.json and ModelConfig
    "d_model": "d_model",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "encoder_attention_heads": "heads",
    "encoder_ffn_dim": "ffn_dim",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "max_position_embeddings": "max_positions",
    "vocab_size": "source_vocab_size",
}
_DEFAULTS = {"dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0}
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
# The only values that mtrain supports, by model type. The models themselves have an option for the first one
# only; the others may differ in configs written by other programs, and CTranslate2's converter needs them.
FIXED: dict[str, dict[str, bool]] = {
    "marian": {
        "scale_embedding": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "layernorm_embedding": False,
        "add_final_layer_norm": False,
        "add_bias_logits": False,
        "static_position_embeddings": True,
    },
    "pegasus": {"scale_embedding": True, "normalize_before": True, "normalize_embedding": False},
    "m2m_100": {"scale_embedding": True},
}
_LICENSE_OF_NLLB = "cc-by-nc-4.0"  # unless the card in the folder states another one
_PROPERTIES = ("source_lang=", "target_lang=", "normalizes_punctuation=")
PEGASUS_TOKENIZER = (
    "sentencepiece.bpe.model"  # the SentencePiece model; Marian's are source.spm and target.spm
)


def import_model(source: str, out: Path, overrides: Sequence[str] = ()) -> bool:
    """Create a model folder from a MarianMTModel or an M2M100ForConditionalGeneration in a folder or on the
    Hugging Face Hub, or from an exported PegasusForConditionalGeneration.

    `overrides` set `decoding.*`, `source_lang`, `target_lang` and, of models with codes of languages,
    `normalizes_punctuation`. Returns whether the model has such codes. Raises ModelError if something is
    missing, damaged or unsupported, and UsageError if `out` exists.
    """
    require_new_folder(out)
    folder = source_folder(source)
    config = read_object(folder / "config.json")
    if (kind := config.get("model_type")) not in FIXED:
        known = "neither a MarianMT, nor an M2M-100, NLLB-200 or Pegasus model"
        raise ModelError(f"{folder}: {known}; model_type in config.json is {kind!r}")

    def fill(temporary: Path) -> None:
        names = read_object(folder / "tokenizer_config.json", optional=True)
        separate = bool(names.get("separate_vocabs"))
        file, theirs = read_weights(folder)
        into, imported = temporary / "tokenizer", None
        if kind == "m2m_100":
            imported = take_tokenizer(folder, into, config.get("vocab_size"))
            tokenizer = imported.tokenizer
        else:
            tokenizer = _take_tokenizer(folder, into, config, separate, theirs)
        sizes = config
        if tokenizer.source.ids is None and config.get("vocab_size") == len(tokenizer.source) + 1:
            theirs = without_last_token(theirs)
            sizes = config | dict.fromkeys(("vocab_size", "decoder_vocab_size"), len(tokenizer.source))
            sizes["decoder_start_token_id"] = tokenizer.special.bos
        model = _model_config(sizes, tokenizer)
        if kind == "pegasus":
            model = model.model_copy(update={"positions": positions_in(theirs, model)})
        tensors, model = from_transformers(theirs, config, model, file)
        limit, positions = names.get("model_max_length"), model.max_positions
        raw = {
            **_languages(names, imported),
            "max_length": min(limit, positions) if isinstance(limit, int) and limit >= 2 else positions,
            "tokenizer": {"vocab_size": len(tokenizer.source), "joint": tokenizer.joint, "path": source},
            "model": model.model_dump(mode="json"),
            "decoding": _decoding(folder, config, model, imported),
        }
        settled = validate(ModelFolderConfig, raw, source, ModelError)
        if (highest := max(settled.decoding.forbidden_ids, default=0)) >= model.target_vocab_size:
            raise ModelError(f"generation settings: bad_words_ids: {highest} is not a token id of this model")
        changed = _with_overrides(settled, overrides)
        if imported is not None:
            write_languages(into, tokenizer.source.codes, changed.normalizes_punctuation)
        elif "und" in (changed.source_lang, changed.target_lang):
            advice = "set them with --set source_lang=... --set target_lang=..."
            log.warning("%s: unknown languages; %s", folder, advice)
        write_text(temporary / "config.yaml", to_yaml(changed))
        save_file(tensors, temporary / "model.safetensors")
        on_hub = not path_of(source).exists()
        original = Ancestor(name=source, hub=True) if on_hub else describe_ancestor(folder)
        license_ = _stated_license(folder)
        if license_ is None and imported is not None and imported.is_nllb:
            license_ = _LICENSE_OF_NLLB
        origin = Origin(kind="imported", ancestors=[original], license=license_)
        write_info(temporary, new_info(name_of(out), origin))
        write_card(temporary)

    write_new_folder(out, fill)
    return kind == "m2m_100"


def _stated_license(folder: Path) -> str | None:
    """The license in the card of a folder, if it has a readable one."""
    try:
        return stated_license(read_card(folder) or "")
    except ModelError as error:
        log.warning("%s: no license: %s", folder, error)
        return None


def _with_overrides(config: ModelFolderConfig, overrides: Sequence[str]) -> ModelFolderConfig:
    """The config with other decoding settings, languages and normalization."""
    properties = _PROPERTIES if config.languages else _PROPERTIES[:2]
    raw = config.model_dump(mode="json")
    for assignment in overrides:
        if not assignment.startswith(("decoding.", *properties)):
            known = ", ".join(name.rstrip("=") for name in properties)
            raise UsageError(f"--set {assignment}: only decoding.*, {known} can be set")
        raw = override(raw, assignment)
    changed = validate(ModelFolderConfig, raw, "--set")
    check_forbidden_ids(changed.decoding, changed.model.target_vocab_size)
    return changed


def _languages(names: dict[str, Any], imported: ImportedTokenizer | None) -> dict[str, Any]:
    """The raw keys of a model folder for languages, from tokenizer_config.json."""
    if imported is None:
        return {
            "source_lang": names.get("source_lang") or "und",
            "target_lang": names.get("target_lang") or "und",
            "language_tags": names.get("language_tags") or "none",
        }
    codes = imported.tokenizer.source.codes
    chosen = [names.get(key) if names.get(key) in codes else "und" for key in ("src_lang", "tgt_lang")]
    return {
        "source_lang": chosen[0],
        "target_lang": chosen[1],
        "language_tags": "codes_last" if names.get("legacy_behaviour") else "codes",
        "languages": [*codes],
        "normalizes_punctuation": imported.is_nllb,
    }


def mappings_of(separate: bool) -> dict[str, str]:
    """The file that maps the tokens of each side to ids."""
    return {"source": "vocab.json", "target": "target_vocab.json" if separate else "vocab.json"}


def _take_tokenizer(
    folder: Path, into: Path, config: dict[str, Any], separate: bool, theirs: dict[str, Tensor]
) -> Tokenizer:
    """Copy the SentencePiece models, and the mapping of tokens to ids unless mtrain exported the folder."""
    into.mkdir()
    mappings = mappings_of(separate)
    pegasus = config["model_type"] == "pegasus"
    models = {side: PEGASUS_TOKENIZER if pegasus else f"{side}.spm" for side in mappings}
    for name in (*models.values(), *mappings.values()):
        if not (folder / name).is_file():
            raise ModelError(f"{folder}: missing file {name}")
    own = separate or read_file(folder / models["source"]) == read_file(folder / models["target"])
    for side, mapping in mappings.items():
        shutil.copyfile(folder / models[side], into / f"{side}.model")
        ids = Vocabulary(into / f"{side}.model", folder / mapping).ids
        own = own and _is_own(into / f"{side}.model", ids, config, theirs)
    if own and not separate:
        (into / "source.model").rename(into / "joint.model")
        (into / "target.model").unlink()
    elif not own and separate:
        for side, mapping in mappings.items():
            shutil.copyfile(folder / mapping, into / f"{side}_vocab.json")
    elif not own:
        shutil.copyfile(folder / "vocab.json", into / "vocab.json")
    return Tokenizer(into)


def _is_own(
    model: Path, ids: dict[str, int] | None, config: dict[str, Any], theirs: dict[str, Tensor]
) -> bool:
    """Whether a mapping of tokens to ids equals the one in the SentencePiece model, apart from a start token
    that an export has added and that BOS can replace."""
    try:
        vocabulary = Vocabulary(model)
    except ModelError:  # a special token is missing
        return False
    start, bos = config.get("decoder_start_token_id"), vocabulary.special.bos
    if start == len(vocabulary) and ids == with_pad_last(vocabulary):
        return starts_like(theirs, start, bos)
    return start == bos and ids == {piece: i for i, piece in enumerate(vocabulary.pieces)}


def with_pad_last(vocabulary: Vocabulary) -> dict[str, int]:
    """The ids of the pieces of a vocabulary with <pad> added at its end. The original <pad> is renamed."""
    pieces = [*vocabulary.pieces, "<pad>"]
    pieces[vocabulary.special.pad] = f"<no piece {vocabulary.special.pad}>"
    return {piece: i for i, piece in enumerate(pieces)}


def _model_config(config: dict[str, Any], tokenizer: Tokenizer) -> ModelConfig:
    """The architecture of a config, with sinusoidal positions: those of Pegasus are in the weights. Raises
    ModelError if it is unsupported."""
    kind = config["model_type"]

    def given(key: str) -> Any:
        value = config.get(key)
        if value is None and key not in _DEFAULTS:
            raise ModelError(f"config.json: {key} is missing")
        return _DEFAULTS[key] if value is None else value

    for key, ours in FIXED[kind].items():
        value = config.get(key, key != "scale_embedding" and ours)
        if value is not ours:
            raise ModelError(f"config.json: unsupported: {key}: {value!r}; must be {ours}")
    for key in ("attention_heads", "ffn_dim"):
        sides = given(f"encoder_{key}"), given(f"decoder_{key}")
        if sides[0] != sides[1]:
            raise ModelError(f"config.json: unsupported: {key} of encoder and decoder differ: {sides}")
    activation = given("activation_function")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"config.json: unsupported: activation_function: {activation!r}; known: {known}")
    special = tokenizer.special
    for key, wanted in {"eos_token_id": special.eos, "decoder_start_token_id": special.bos}.items():
        if given(key) != wanted:
            raise ModelError(f"config.json: {key} is {config[key]!r}, but the vocabulary's is {wanted}")
    shared = config.get("share_encoder_decoder_embeddings", True)
    tied = config.get("tie_word_embeddings", True)
    raw: dict[str, Any] = {ours: given(theirs) for theirs, ours in EQUIVALENT.items()}
    raw |= special.options() | {
        "target_vocab_size": config.get("decoder_vocab_size") or raw["source_vocab_size"],
        "activation": _ACTIVATIONS[activation],
        "norm": "post" if kind == "marian" else "pre",
        "positions": "sinusoidal_marian" if kind == "m2m_100" else "sinusoidal",
        "first_position": special.pad + 1 if kind == "m2m_100" else 0,
        "tie_embeddings": ("all" if shared else "decoder") if tied else "none",
        "output_bias": True,
    }
    model = validate(ModelConfig, raw, "config.json", ModelError)
    sizes = model.source_vocab_size, model.target_vocab_size
    pieces = len(tokenizer.source), len(tokenizer.target)
    if sizes != pieces or (shared and sizes[0] != sizes[1]):
        raise ModelError(f"config.json: vocabulary sizes are {sizes}, but the vocabulary files have {pieces}")
    return model


def _decoding(
    folder: Path, config: dict[str, Any], model: ModelConfig, imported: ImportedTokenizer | None
) -> dict[str, Any]:
    """The raw `decoding` section, from generation_config.json or, for older models, from config.json."""
    generation = read_object(folder / "generation_config.json", optional=True)
    if not generation:
        generation = {"forced_eos_token_id": model.eos_id, **config} if imported is None else dict(config)
    if imported is not None:
        generation.pop("forced_bos_token_id", None)  # the code of a target language, which users choose
    starts = generation.get("decoder_start_token_id")
    if starts not in (None, config["decoder_start_token_id"]):
        raise ModelError(f"generation settings: decoder_start_token_id is {starts!r}; config.json differs")
    decoding = decoding_from_generation(generation, model.eos_id, model.max_positions)
    if imported is not None:
        decoding["forbidden_ids"] = sorted({*decoding["forbidden_ids"], *imported.unused})
        decoding["max_length_offset"] -= 1  # which does not count the code of the target
    return decoding
