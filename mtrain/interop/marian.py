"""Import of tokenizers and architectures from Hugging Face Transformers: MarianMTModel (Junczys-Dowmunt et
al., "Marian", ACL 2018), PegasusForConditionalGeneration as `mtrain export` writes it, and
M2M100ForConditionalGeneration, whose tokenizer is in another module."""

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from mtrain.config.load import validate
from mtrain.config.sections.model import ModelConfig
from mtrain.errors import ModelError
from mtrain.interop.huggingface import SENTENCEPIECE
from mtrain.interop.marian_tensors import starts_like
from mtrain.regular_files import read_file
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.tokenizer.vocabulary import Vocabulary

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
# The values of keys that a config.json lacks. Sizes must be given.
_DEFAULTS: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0}
_DEFAULTS |= {"scale_embedding": False, "share_encoder_decoder_embeddings": True, "tie_word_embeddings": True}
_DEFAULTS_OF_M2M_100 = _DEFAULTS | {"attention_dropout": 0.1, "scale_embedding": True}
_DEFAULTS_OF_M2M_100 |= {"activation_function": "relu", "eos_token_id": 2, "decoder_start_token_id": 2}
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


def mappings_of(separate: bool) -> dict[str, str]:
    """The file that maps the tokens of each side to ids."""
    return {"source": "vocab.json", "target": "target_vocab.json" if separate else "vocab.json"}


def take_marian_tokenizer(
    folder: Path, into: Path, config: dict[str, Any], separate: bool, theirs: dict[str, Tensor]
) -> Tokenizer:
    """Copy the SentencePiece models, and the mapping of tokens to ids unless mtrain exported the folder."""
    into.mkdir()
    mappings = mappings_of(separate)
    pegasus = config["model_type"] == "pegasus"
    models = {side: SENTENCEPIECE if pegasus else f"{side}.spm" for side in mappings}
    for name in (*models.values(), *mappings.values()):
        if not (folder / name).is_file():
            raise ModelError(f"{folder}: missing file {name}")
    own = separate or read_file(folder / models["source"]) == read_file(folder / models["target"])
    for side, mapping in mappings.items():
        ids = Vocabulary(folder / models[side], folder / mapping).ids
        shutil.copyfile(folder / models[side], into / f"{side}.model")
        own = own and _is_own(into / f"{side}.model", ids, config.get("decoder_start_token_id"), theirs)
    if own and not separate:
        (into / "source.model").rename(into / "joint.model")
        (into / "target.model").unlink()
    elif not own and separate:
        for side, mapping in mappings.items():
            shutil.copyfile(folder / mapping, into / f"{side}_vocab.json")
    elif not own:
        shutil.copyfile(folder / "vocab.json", into / "vocab.json")
    return Tokenizer(into)


def _is_own(model: Path, ids: dict[str, int] | None, start: Any, theirs: dict[str, Tensor]) -> bool:
    """Whether a mapping of tokens to ids equals the one in the SentencePiece model, apart from a start token
    that an export has added and that BOS can replace."""
    try:
        vocabulary = Vocabulary(model)
    except ModelError:  # a special token is missing
        return False
    bos = vocabulary.special.bos
    if start == len(vocabulary) and ids == with_pad_last(vocabulary):
        return starts_like(theirs, start, bos)
    return start == bos and ids == {piece: i for i, piece in enumerate(vocabulary.pieces)}


def with_pad_last(vocabulary: Vocabulary) -> dict[str, int]:
    """The ids of the pieces of a vocabulary with <pad> added at its end. The original <pad> is renamed."""
    pieces = [*vocabulary.pieces, "<pad>"]
    pieces[vocabulary.special.pad] = f"<no piece {vocabulary.special.pad}>"
    return {piece: i for i, piece in enumerate(pieces)}


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the values that Transformers assumes for missing keys."""
    kind = config["model_type"]
    defaults = _DEFAULTS_OF_M2M_100 if kind == "m2m_100" else _DEFAULTS
    config = defaults | {key: x for key, x in config.items() if x is not None or key not in defaults}
    if kind != "marian":  # Transformers ignores these keys
        config |= {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": None}
    if not config["tie_word_embeddings"]:
        config["share_encoder_decoder_embeddings"] = False
    return config


def architecture(config: dict[str, Any], tokenizer: Tokenizer) -> ModelConfig:
    """The architecture of a config `with_defaults`, with sinusoidal positions; see `positions_in` for
    Pegasus. Raises ModelError if it is unsupported."""
    kind = config["model_type"]

    def given(key: str) -> Any:
        if (value := config.get(key)) is None:
            raise ModelError(f"config.json: {key} is missing")
        return value

    for key, ours in FIXED[kind].items():
        if (value := config.get(key, ours)) is not ours:
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
    shared, tied = config["share_encoder_decoder_embeddings"], config["tie_word_embeddings"]
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
