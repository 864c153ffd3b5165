"""The models that each format of `mtrain export` supports, and the lengths in exported models."""

import importlib
from types import ModuleType
from typing import get_args

from mtrain.checkpoint.model_folder import LoadedModel
from mtrain.config.language_names import find_language
from mtrain.config.languages import LanguageTags
from mtrain.config.schema import Config, Format, ModelFolderConfig
from mtrain.config.sections.model import Architecture, ModelConfig
from mtrain.errors import UsageError
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.tokenizer.vocabulary import Vocabulary

# Of exported sinusoidal encodings, which are constants there. Longer texts are an error in other programs, or
# are encoded in another way.
MIN_POSITIONS = 1024


def concrete_format(config: Config | ModelFolderConfig, format: Format) -> Format:
    """The format itself or, for `transformers`, the format that suits the layers and the languages."""
    if format != "transformers":
        return format
    if _tags(config).startswith("codes"):
        return "m2m_100"
    return "pegasus" if config.model.norm == "pre" else "marian"


def _tags(config: Config | ModelFolderConfig) -> LanguageTags:
    return config.data.language_tags if isinstance(config, Config) else config.language_tags


def unsupported_reason(config: Config | ModelFolderConfig, format: Format) -> str | None:
    """Why a format does not support a model; None if it does."""
    model, tags, format = config.model, _tags(config), concrete_format(config, format)
    if model.is_classifier:
        return "model.head must be translation"
    if format == "ctranslate2":  # supports every other option of Architecture
        return None
    if format == "bergamot":
        if tags != "none":
            return "language_tags must be none, because the engine cannot begin a text with a tag"
        return _settings_of_bergamot(model)
    if format == "argos":
        if tags != "none":
            return "language_tags must be none, because Argos Translate cannot begin a text with a tag"
        direction = config.data.direction if isinstance(config, Config) else config.direction
        if unknown := [code for code in direction if find_language(code) is None]:
            return f"both languages must have codes of ISO 639, and {unknown[0]} is not one"
        return None
    if tags.startswith("codes") != (format == "m2m_100"):
        with_codes = "models imported from M2M-100 or NLLB-200, which have codes of languages"
        return f"it is {'only' if format == 'm2m_100' else 'not'} for {with_codes}"
    if model.activation == "swiglu":
        return "model.activation must not be swiglu"
    if format == "marian":
        if model.norm != "post":
            return "model.norm must be post"
        if model.positions != "sinusoidal" or model.first_position:
            return "model.positions must be sinusoidal" + (" and start at 0" * bool(model.first_position))
        return None
    if model.norm != "pre":
        return "model.norm must be pre"
    if model.positions == "rotary":
        return "model.positions must not be rotary"
    if format == "m2m_100" and (model.positions, model.first_position) != ("sinusoidal_marian", 2):
        return "model.positions must be sinusoidal_marian, and model.first_position 2"
    return None if model.tie_embeddings == "all" else "model.tie_embeddings must be all"


def _settings_of_bergamot(model: Architecture) -> str | None:
    """The settings to change for Bergamot; None if there are none."""
    wanted = {
        "norm must be post": model.norm == "post",
        "positions must be sinusoidal_marian": model.positions == "sinusoidal_marian",
        "first_position must be 0": model.first_position == 0,
        "activation must be relu or silu": model.activation in ("relu", "silu"),
        "d_model and ffn_dim must be multiples of 64": not (model.d_model % 64 or model.ffn_dim % 64),
    }
    return ", ".join(f"model.{setting}" for setting, holds in wanted.items() if not holds) or None


def unsupported_tokenizer(tokenizer: Tokenizer, format: Format) -> str | None:
    """Why a concrete format does not support a tokenizer; None if it does. CTranslate2 supports all."""
    sides = tokenizer.source, tokenizer.target
    models = {each.processor.serialized_model_proto() for each in sides}
    if format == "pegasus" and len(models) > 1:
        return "its tokenizer has a SentencePiece model for each language"
    if format == "argos" and tokenizer.source.marian_tags:
        return "Argos Translate cannot begin a text with a tag such as " + tokenizer.source.marian_tags[0]
    if format == "bergamot" and not all(map(_has_own_ids, sides)):
        return "its token ids (vocab.json) are not those of its SentencePiece model"
    return None


def _has_own_ids(vocabulary: Vocabulary) -> bool:
    """Whether the ids of a vocabulary are those of its SentencePiece model. Others may follow them."""
    own = vocabulary.processor.id_to_piece(list(range(len(vocabulary.processor))))
    pairs = enumerate(zip(own, vocabulary.pieces, strict=False))
    return all(theirs in (piece, f"<no piece {i}>") for i, (piece, theirs) in pairs)


def cure(config: Config | ModelFolderConfig, format: Format, other: str = "use {}") -> str:
    """What to do if a format does not support a translation model. `other` is the advice to use another
    format, whose name replaces `{}`."""
    if format == "bergamot" and _tags(config) == "none":
        return "train with model.preset: student_tiny or student_base, which have these settings"
    needs_ctranslate2 = format == "argos" or unsupported_reason(config, "transformers")
    return other.format("ctranslate2" if needs_ctranslate2 else "transformers")


def problem_of(
    config: Config | ModelFolderConfig, format: Format, tokenizer: Tokenizer | None, other: str = "use {}"
) -> str | None:
    """An error message if a format does not support a model or its tokenizer (None: not learned yet); None if
    it supports both. For `other`, see `cure`."""
    advice = other.format("ctranslate2")
    if reason := unsupported_reason(config, format):
        advice = "leave it out" if config.model.is_classifier else cure(config, format, other)
    elif tokenizer:
        reason = unsupported_tokenizer(tokenizer, concrete_format(config, format))
    return f"{format} does not support this model: {reason}; {advice}" if reason else None


def require_exports(config: Config, tokenizer: Tokenizer | None = None) -> None:
    """Raise UsageError if a format in `export.require` does not support the model; see `problem_of`."""
    for format in config.export.require:
        if problem := problem_of(config, format, tokenizer):
            raise UsageError(f"export.require: {problem}")


def describe_exports(config: Config, tokenizer: Tokenizer) -> str:
    """Which formats support a model, for the log."""

    def answer(format: Format) -> str:
        reason = unsupported_reason(config, format) or unsupported_tokenizer(tokenizer, format)
        return f"{format}: no ({reason})" if reason else f"{format}: yes"

    return ", ".join(answer(format) for format in get_args(Format) if format != "transformers")


def longest_output(loaded: LoadedModel) -> int:
    """The largest length of a translation, in tokens, with the code of the target language. It does not
    depend on the source, because the formats have only a constant limit."""
    decoding, model = loaded.config.decoding, loaded.model.config
    limit = int(loaded.config.max_length * decoding.max_length_ratio + decoding.max_length_offset)
    limit += bool(loaded.tokenizer.source.codes)
    return min(limit, model.max_positions) if model.positions == "learned" else limit


def with_positions(loaded: LoadedModel) -> ModelConfig:
    """The settings of a model, with enough positions for its longest source and translation. Learned
    positions do not change."""
    model = loaded.model.config
    positions = max(model.max_positions, MIN_POSITIONS, loaded.config.max_length, longest_output(loaded))
    return model if model.positions == "learned" else model.model_copy(update={"max_positions": positions})


def import_optional(module: str) -> ModuleType:
    """Import a module of an optional dependency. Raises UsageError, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UsageError(f"{package} is not installed: pip install 'mtrain[interop]' ({error})") from None
