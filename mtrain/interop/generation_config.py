"""Conversion between the settings in Hugging Face's `generation_config.json` and the `decoding` section."""

from typing import Any

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.errors import ModelError

# Equivalent settings: Hugging Face's name, mtrain's name, and Hugging Face's default.
_EQUIVALENT: tuple[tuple[str, str, Any], ...] = (
    ("num_beams", "beam_size", 1),
    ("length_penalty", "length_penalty", 1.0),
    ("no_repeat_ngram_size", "no_repeat_ngram", 0),
    ("min_length", "min_length_offset", 0),  # counts the start token; mtrain counts EOS
    ("renormalize_logits", "renormalize", False),
)
_STOPS = {False: "default", True: "first_k", "never": "exact"}  # early_stopping and decoding.stop
# Settings that change translations and that mtrain does not support, with the value that has no effect.
_UNSUPPORTED: dict[str, Any] = {
    "do_sample": False,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "min_new_tokens": 0,
    **dict.fromkeys(("max_time", "stop_strings", "forced_bos_token_id", "sequence_bias", "constraints")),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "force_words_ids", "penalty_alpha")),
    **dict.fromkeys(("exponential_decay_length_penalty", "dola_layers", "watermarking_config")),
}
# Settings of mtrain that Hugging Face does not support.
_MTRAIN_ONLY = ("coverage_penalty", "samples", "mbr", "min_length_ratio", "split")


def decoding_from_generation(generation: dict[str, Any], eos_id: int, max_positions: int) -> dict[str, Any]:
    """The raw `decoding` section that is equivalent to generation settings.

    Raises ModelError, which names the setting, if one is unsupported or invalid.
    """

    def given(key: str, default: Any) -> Any:
        value = generation.get(key)
        return default if value is None else value

    for key, neutral in _UNSUPPORTED.items():
        if given(key, neutral) != neutral:
            raise ModelError(f"generation settings: unsupported: {key}: {generation[key]!r}")
    stop, forced = given("early_stopping", False), given("forced_eos_token_id", None)
    if not isinstance(stop, (bool, str)) or stop not in _STOPS:
        raise ModelError(f"generation settings: unsupported: early_stopping: {stop!r}")
    if forced not in (None, eos_id, [eos_id]):
        raise ModelError(f"generation settings: forced_eos_token_id is {forced!r}, but EOS is {eos_id}")
    forbidden = given("bad_words_ids", [])
    if not isinstance(forbidden, list) or not all(isinstance(x, list) and len(x) == 1 for x in forbidden):
        raise ModelError("generation settings: unsupported: bad_words_ids with other than single tokens")
    total = given("max_length", max_positions + 1)  # counts the start token
    limit = given("max_new_tokens", total - 1 if type(total) is int else total)
    if type(limit) is not int:
        raise ModelError(f"generation settings: the maximum length must be an integer; got {limit!r}")
    return {
        **{ours: given(theirs, default) for theirs, ours, default in _EQUIVALENT},
        "stop": _STOPS[stop],
        "forbidden_ids": [ids[0] for ids in forbidden if ids != [eos_id]],  # generate ignores EOS here
        "force_eos": forced is not None,
        "max_length_ratio": 0.0,
        "max_length_offset": min(limit, max_positions),
    }


def generation_from_decoding(decoding: DecodingConfig, ids: ModelConfig, limit: int) -> dict[str, Any]:
    """The equivalent generation settings, with the same length limit, in tokens, for every sentence."""
    settings = {theirs: getattr(decoding, ours) for theirs, ours, _ in _EQUIVALENT}
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


def exportable(decoding: DecodingConfig) -> DecodingConfig:
    """`decoding` without the settings that Hugging Face does not support, except for the length limit."""
    return decoding.model_copy(update=DecodingConfig().model_dump(include={*_MTRAIN_ONLY}))


def not_exportable(decoding: DecodingConfig) -> list[str]:
    """The keys of `decoding` that have an effect but are not supported by Hugging Face."""
    changed = decoding.model_dump(include={*_MTRAIN_ONLY}, exclude_defaults=True)
    return [*changed, *(["max_length_ratio"] if decoding.max_length_ratio else [])]
