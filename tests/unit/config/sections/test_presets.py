"""Model sizes by name, and when mtrain chooses them."""

from typing import get_args

import pytest

from mtrain.config.sections.model import Preset
from mtrain.config.sections.presets import PRESETS, SIZES
from mtrain.config.yaml_io import parse_yaml, to_yaml


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_the_sizes(load_text, preset: str):
    model = load_text(f"model.preset={preset}").model
    assert {key: getattr(model, key) for key in SIZES} == PRESETS[preset]
    assert model.preset is None


def test_each_preset_can_be_chosen():
    assert PRESETS.keys() == set(get_args(Preset)) - {"auto"}


def test_explicit_keys_win_over_a_preset(load_text):
    model = load_text("model={decoder_layers: 1, preset: base, d_model: 256}").model
    assert (model.d_model, model.decoder_layers, model.encoder_layers, model.ffn_dim) == (256, 1, 6, 2048)


def test_the_resolved_config_holds_numbers(load_text):
    resolved = parse_yaml(to_yaml(load_text("model.preset=big")))
    assert resolved["model"]["preset"] is None
    assert resolved["model"]["d_model"] == 1024


@pytest.mark.parametrize(
    "overrides",
    [[], ["model.dropout=0.2"], ["model.preset=auto"], ["training={}"], ["training.init_from=runs/y"]],
)
def test_without_sizes_mtrain_chooses_them(load_text, overrides):
    assert load_text(*overrides).model.preset == "auto"


@pytest.mark.parametrize("override", ["model.d_model=256", "model.preset=small", "model.preset=null"])
def test_a_size_or_a_preset_excludes_the_automatic_recipe(load_text, override):
    assert load_text(override).model.preset is None
