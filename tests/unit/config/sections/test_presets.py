"""Model sizes by name, and when mtrain chooses them."""

from typing import get_args

import pytest

from mtrain.config.sections.model import Preset
from mtrain.config.sections.presets import PRESETS, SIZES, STUDENTS
from mtrain.config.yaml_io import parse_yaml, to_yaml
from mtrain.interop.formats import require_exports


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_the_sizes(load_text, preset: str):
    model = load_text(f"model.preset={preset}").model
    assert {key: getattr(model, key) for key in SIZES} == PRESETS[preset]
    assert model.preset is None


@pytest.mark.parametrize(("preset", "width"), [("student_tiny", 256), ("student_base", 512)])
def test_a_student_can_be_exported_to_bergamot(load_text, preset, width):
    config = load_text(f"model.preset={preset}", "export.require=[bergamot]")
    require_exports(config)
    assert (config.model.d_model, config.model.encoder_layers, config.model.decoder_layers) == (width, 6, 2)
    assert config.model.preset == "auto"  # for what a student preset does not set


def test_each_preset_can_be_chosen():
    assert {*PRESETS, *STUDENTS} == set(get_args(Preset)) - {"auto"}


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
