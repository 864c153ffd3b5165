"""How translations are searched for: Hugging Face's `generation_config.json` and mtrain's `decoding`."""

from typing import Any

from mtrain.config.schema import DecodingConfig, ModelConfig
from mtrain.errors import ModelError

# Theirs, ours, and what theirs is where it is not given.
_SAME: tuple[tuple[str, str, Any], ...] = (
    ("num_beams", "beam_size", 1),
    ("length_penalty", "length_penalty", 1.0),
    ("no_repeat_ngram_size", "no_repeat_ngram", 0),
    ("min_length", "min_length_offset", 0),  # counts what the target starts with, as ours counts EOS
    ("renormalize_logits", "renormalize", False),
)
_STOPS = {False: "default", True: "first_k", "never": "exact"}  # early_stopping
# What changes which translation is found and has no like in mtrain, with the value that changes nothing.
_UNLIKE: dict[str, Any] = {
    "do_sample": False,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "forced_bos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "constraints": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "watermarking_config": None,
}
# What is lost the other way.
_LOST = ("coverage_penalty", "samples", "mbr", "min_length_ratio")


def decoding_from(generation: dict[str, Any], eos_id: int, positions: int) -> dict[str, Any]:
    """The raw `decoding` section of generation settings; `positions` is the most that the model has.

    Raises ModelError naming what mtrain cannot do.
    """

    def given(key: str, otherwise: Any) -> Any:
        value = generation.get(key)
        return otherwise if value is None else value

    for key, neutral in _UNLIKE.items():
        if given(key, neutral) != neutral:
            raise ModelError(f"generation settings: {key}: {generation[key]!r} is nothing that mtrain knows")
    stop, forced = given("early_stopping", False), given("forced_eos_token_id", None)
    if not isinstance(stop, (bool, str)) or stop not in _STOPS:
        raise ModelError(f"generation settings: early_stopping: {stop!r} is nothing that mtrain knows")
    if forced not in (None, eos_id, [eos_id]):
        raise ModelError(f"generation settings: forced_eos_token_id is {forced!r}, but EOS is {eos_id}")
    barred = given("bad_words_ids", [])
    if not isinstance(barred, list) or not all(isinstance(ids, list) and len(ids) == 1 for ids in barred):
        raise ModelError("generation settings: bad_words_ids: mtrain can forbid single tokens only")
    total = given("max_length", positions + 1)  # counts what the target starts with
    limit = given("max_new_tokens", total - 1 if type(total) is int else total)
    if type(limit) is not int:
        raise ModelError(f"generation settings: {limit!r} is no length")
    return {
        **{ours: given(theirs, default) for theirs, ours, default in _SAME},
        "stop": _STOPS[stop],
        "forbidden_ids": [ids[0] for ids in barred if ids != [eos_id]],  # EOS is never barred
        "force_eos": forced is not None,
        "max_length_ratio": 0.0,
        "max_length_offset": min(limit, positions),
    }


def limit_of(decoding: DecodingConfig, longest: int) -> int:
    """The longest translation, tokens, of a source of `longest` tokens."""
    return int(longest * decoding.max_length_ratio + decoding.max_length_offset)


def generation_from(decoding: DecodingConfig, ids: ModelConfig, limit: int) -> dict[str, Any]:
    """Generation settings, of which `limit`, tokens, is the same for every sentence."""
    settings = {theirs: getattr(decoding, ours) for theirs, ours, _ in _SAME}
    return {
        **settings,
        "early_stopping": next(theirs for theirs, ours in _STOPS.items() if ours == decoding.stop),
        "bad_words_ids": [[i] for i in decoding.forbidden_ids] or None,
        "forced_eos_token_id": ids.eos_id if decoding.force_eos else None,
        "max_length": limit + 1,
        "decoder_start_token_id": ids.bos_id,
        "pad_token_id": ids.pad_id,
        "eos_token_id": ids.eos_id,
    }


def kept(decoding: DecodingConfig) -> DecodingConfig:
    """What generation settings say of it, but for the longest translation."""
    plain = DecodingConfig()
    return decoding.model_copy(update={key: getattr(plain, key) for key in _LOST})


def not_kept(decoding: DecodingConfig) -> list[str]:
    """The keys of `decoding` that generation settings have no like of, where they are set."""
    return [key for key in (*_LOST, "max_length_ratio") if getattr(decoding, key)]
