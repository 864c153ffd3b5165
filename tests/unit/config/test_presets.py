"""Model sizes by name, and by the number of training pairs."""

from typing import get_args

import pytest

from mtrain.config.model import Preset
from mtrain.config.presets import AUTO_SIZES, PRESETS, auto_size
from mtrain.config.yaml_io import parse_yaml, to_yaml

SIZES = {
    "tiny": (128, 256, 4, 4, 4),
    "small": (256, 1024, 4, 3, 3),
    "base": (512, 2048, 8, 6, 6),
    "big": (1024, 4096, 16, 6, 6),
    "tiny_deep": (128, 256, 4, 6, 1),
    "small_deep": (256, 1024, 4, 6, 1),
    "base_deep": (512, 2048, 8, 12, 1),
    "big_deep": (1024, 4096, 16, 12, 1),
}


@pytest.mark.parametrize("preset", SIZES)
def test_a_preset_fills_the_sizes(load_text, preset: str):
    model = load_text(f"model.preset={preset}").model
    sizes = (model.d_model, model.ffn_dim, model.heads, model.encoder_layers, model.decoder_layers)
    assert sizes == SIZES[preset]
    assert model.preset is None


def test_presets_are_the_documented_ones():
    assert PRESETS.keys() == SIZES.keys() == set(get_args(Preset)) - {"auto"}


def test_explicit_keys_win_over_a_preset(load_text):
    model = load_text("model={decoder_layers: 1, preset: base, d_model: 256}").model
    assert (model.d_model, model.decoder_layers, model.encoder_layers, model.ffn_dim) == (256, 1, 6, 2048)


def test_the_resolved_config_holds_numbers(load_text):
    resolved = parse_yaml(to_yaml(load_text("model.preset=big")))
    assert resolved["model"]["preset"] is None
    assert resolved["model"]["d_model"] == 1024


@pytest.mark.parametrize(
    ("pairs", "preset", "vocab_size"),
    [
        (1_999, "tiny", 1_000),
        (5_000, "tiny", 4_000),  # the toy corpus
        (29_000, "tiny", 12_000),  # Multi30k
        (160_000, "small", 12_000),  # IWSLT14, Tatoeba
        (4_500_000, "base", 32_000),  # WMT14
        (100_000_000, "big", 32_000),
    ],
)
def test_automatic_sizes_of_well_known_corpora(pairs: int, preset: str, vocab_size: int):
    assert auto_size(pairs)[1:] == (preset, vocab_size)


def test_larger_corpora_get_larger_models_and_vocabularies():
    sizes = [auto_size(pairs) for pairs in (0, *(int(size.below) for size in AUTO_SIZES[:-1]))]
    assert sizes == list(AUTO_SIZES)  # each limit belongs to the next larger size
    for measure in ([PRESETS[size.preset]["d_model"] for size in sizes], [size.vocab_size for size in sizes]):
        assert measure == sorted(measure)
