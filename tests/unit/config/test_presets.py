"""Model sizes by name, and when mtrain chooses them."""

from typing import get_args

import pytest

from mtrain.config.model import Preset
from mtrain.config.presets import PRESETS
from mtrain.config.yaml_io import parse_yaml, to_yaml

SIZES = {
    "micro": (128, 256, 4, 2, 2),
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


@pytest.mark.parametrize("overrides", [[], ["model.dropout=0.2"], ["model.preset=auto"], ["training={}"]])
def test_without_sizes_mtrain_chooses_them(load_text, overrides):
    assert load_text(*overrides).model.preset == "auto"


@pytest.mark.parametrize(
    "override", ["model.d_model=256", "model.preset=small", "model.preset=null", "training.init_from=runs/y"]
)
def test_a_size_a_preset_or_an_initial_model_excludes_automatic_sizes(load_text, override):
    assert load_text(override).model.preset is None
