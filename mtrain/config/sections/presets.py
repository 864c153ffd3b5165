"""Presets: model sizes, and student models for the Bergamot engine."""

from typing import Any

PRESETS: dict[str, dict[str, int]] = {
    "micro": {"d_model": 128, "ffn_dim": 256, "heads": 4, "encoder_layers": 2, "decoder_layers": 2},
    "tiny": {"d_model": 128, "ffn_dim": 256, "heads": 4, "encoder_layers": 4, "decoder_layers": 4},
    "small": {"d_model": 256, "ffn_dim": 1024, "heads": 4, "encoder_layers": 3, "decoder_layers": 3},
    "base": {"d_model": 512, "ffn_dim": 2048, "heads": 8, "encoder_layers": 6, "decoder_layers": 6},
    "big": {"d_model": 1024, "ffn_dim": 4096, "heads": 16, "encoder_layers": 6, "decoder_layers": 6},
}
# Decoding spends nearly all its time in the decoder. More encoder layers compensate for a shallow decoder
# (Kasai et al., "Deep Encoder, Shallow Decoder", ICLR 2021).
for _name, _layers in {"tiny": 6, "small": 6, "base": 12, "big": 12}.items():
    PRESETS[f"{_name}_deep"] = {**PRESETS[_name], "encoder_layers": _layers, "decoder_layers": 1}
# Sizes as in Firefox's models (github.com/mozilla/translations), but with self-attention in the decoder.
STUDENTS: dict[str, dict[str, Any]] = {
    "student_tiny": {"d_model": 256, "ffn_dim": 1536, "heads": 8},
    "student_base": {"d_model": 512, "ffn_dim": 2048, "heads": 8},
}
for _sizes in STUDENTS.values():
    _sizes |= {"encoder_layers": 6, "decoder_layers": 2, "norm": "post", "positions": "sinusoidal_marian"}
    _sizes |= {"alignment_head": True}
SIZES = tuple(PRESETS["tiny"])  # the keys that a preset fills in
