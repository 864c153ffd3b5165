"""Export to Hugging Face Transformers: post-norm models as MarianMTModel, pre-norm models as
PegasusForConditionalGeneration (Zhang et al., "PEGASUS", ICML 2020), whose layers are the same, models with
codes of languages as M2M100ForConditionalGeneration."""

import json
import logging
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from mtrain.checkpoint.model_folder import LoadedModel
from mtrain.config.sections.model import ModelConfig
from mtrain.interop.formats import longest_output, with_positions
from mtrain.interop.generation_config import generation_from_decoding, not_exportable
from mtrain.interop.huggingface import SENTENCEPIECE
from mtrain.interop.m2m_100_tokenizer import write_tokenizer_of_codes
from mtrain.interop.marian import EQUIVALENT, FIXED, mappings_of, with_pad_last
from mtrain.interop.marian_tensors import renamed, to_marian, to_pegasus
from mtrain.storage.atomic import write_text
from mtrain.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)


def write_marian(loaded: LoadedModel, folder: Path) -> None:
    """Write a post-norm model with sinusoidal positions to an empty folder, for transformers to load."""
    model, tokenizer = with_positions(loaded), loaded.tokenizer
    separate, size = not tokenizer.joint, model.target_vocab_size
    # Other programs require a property of all published Marian models: <pad> is the last token, and starts
    # the decoder. With two vocabularies, it cannot be the last of both.
    add_pad = tokenizer.joint and not model.bos_id == model.pad_id == size - 1
    tensors = to_marian(model, loaded.model.state_dict(), add_pad)
    if add_pad:
        added = {"pad_id": size, "bos_id": size, "source_vocab_size": size + 1, "target_vocab_size": size + 1}
        model = model.model_copy(update=added)
    described = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "decoder_vocab_size": model.target_vocab_size,
        "share_encoder_decoder_embeddings": model.tie_embeddings == "all",
        "tie_word_embeddings": model.tie_embeddings != "none",
        **FIXED["marian"],
    }
    _write_model(loaded, folder, model, tensors, described)
    _write_tokenizer(loaded, folder, {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate})
    for side, mapping in mappings_of(separate).items():
        vocabulary: Vocabulary = getattr(tokenizer, side)
        (folder / f"{side}.spm").write_bytes(vocabulary.processor.serialized_model_proto())
        _write_json(folder / mapping, with_pad_last(vocabulary) if add_pad else _ids(vocabulary))


def write_pegasus(loaded: LoadedModel, folder: Path) -> None:
    """Write a pre-norm model with tied embeddings and one SentencePiece model to an empty folder, for
    transformers to load."""
    vocabulary, model = loaded.tokenizer.source, with_positions(loaded)
    tensors = to_pegasus(loaded.model, model.max_positions)
    # CTranslate2's converter takes <pad> for the start token. Padding is masked, so its id may be any.
    model = model.model_copy(update={"pad_id": model.bos_id})
    described = {"architectures": ["PegasusForConditionalGeneration"], "model_type": "pegasus"}
    _write_model(loaded, folder, model, tensors, described | FIXED["pegasus"])
    # Despite its name, this tokenizer is for text. It passes text to SentencePiece and back unchanged, where
    # PegasusTokenizer has no byte pieces, and MarianTokenizer takes >> for a tag and U+2581 for a space.
    start = vocabulary.pieces[model.bos_id]
    names = {"tokenizer_class": "Speech2TextTokenizer", "bos_token": start, "pad_token": start}
    _write_tokenizer(loaded, folder, names)
    (folder / SENTENCEPIECE).write_bytes(vocabulary.processor.serialized_model_proto())
    _write_json(folder / "vocab.json", _ids(vocabulary))


def write_m2m_100(loaded: LoadedModel, folder: Path) -> None:
    """Write a model with codes of languages to an empty folder, for transformers to load.

    Raises ModelError if the vocabulary is neither M2M-100's nor NLLB-200's.
    """
    config, model, vocabulary = loaded.config, with_positions(loaded), loaded.tokenizer.source
    described = {"architectures": ["M2M100ForConditionalGeneration"], "model_type": "m2m_100"}
    tensors = renamed(model, loaded.model.state_dict())
    _write_model(loaded, folder, model, tensors, described | FIXED["m2m_100"])
    known = {"src_lang": config.source_lang, "tgt_lang": config.target_lang}
    names = write_tokenizer_of_codes(vocabulary, folder) | {
        **{key: code for key, code in known.items() if code in vocabulary.codes},
        "legacy_behaviour": config.language_tags == "codes_last",
        "normalizes_punctuation": config.normalizes_punctuation,  # which Transformers does not do
    }
    _write_tokenizer(loaded, folder, names)


def _write_model(
    loaded: LoadedModel, folder: Path, model: ModelConfig, tensors: dict[str, Tensor], keys: dict[str, Any]
) -> None:
    """Write the weights of an exported `model`, its settings with `keys` in addition to the common ones, and
    the settings of `generate`."""
    decoding = loaded.config.decoding
    if changed := not_exportable(decoding):
        lost = ", ".join(f"decoding.{key}" for key in changed)
        log.warning("not exported, because generation_config.json does not support them: %s", lost)
    described = {theirs: getattr(model, ours) for theirs, ours in EQUIVALENT.items()} | {
        "is_encoder_decoder": True,
        "activation_function": model.activation,
        "activation_dropout": model.dropout if model.activation_dropout is None else model.activation_dropout,
        "decoder_attention_heads": model.heads,
        "decoder_ffn_dim": model.ffn_dim,
        "pad_token_id": model.pad_id,
        "eos_token_id": model.eos_id,
        "decoder_start_token_id": model.bos_id,
        "forced_eos_token_id": None,
    }
    codes = loaded.tokenizer.source.codes
    generation = generation_from_decoding(decoding, model, longest_output(loaded))
    if loaded.config.languages and loaded.config.target_lang in codes:
        generation["forced_bos_token_id"] = codes[loaded.config.target_lang]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", described | keys)
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(loaded: LoadedModel, folder: Path, names: dict[str, Any]) -> None:
    """Write tokenizer_config.json with `names` in addition to the common settings."""
    config = loaded.config
    common = {
        "source_lang": config.source_lang,
        "target_lang": config.target_lang,
        "language_tags": config.language_tags,
        "model_max_length": config.max_length,
        "split_special_tokens": True,  # </s> in a text is not the end of the sentence
    }
    _write_json(folder / "tokenizer_config.json", names | common)


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return vocabulary.ids or {piece: i for i, piece in enumerate(vocabulary.pieces)}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    # In ASCII: Transformers 4 reads some files in the encoding of the system.
    write_text(file, json.dumps(value, indent=1) + "\n")
