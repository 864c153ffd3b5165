"""The best weights of a run are published in its model folder."""

import pytest

from mtrain.checkpoint.model_folder import load_model
from tests.support.training import fit_on_cpu, with_bleu


def test_a_stale_model_folder_is_published_again(make_config):
    run = fit_on_cpu(make_config())
    good = (run / "model/model.safetensors").read_bytes()
    (run / "model/model.safetensors").write_bytes(b"stale")
    (run / "model/manifest.json").write_text("{}")
    fit_on_cpu(make_config())  # a finished run
    assert (run / "model/model.safetensors").read_bytes() == good
    fit_on_cpu(make_config(decoding={"beam_size": 2, "max_length_ratio": 1.4}))
    assert load_model(run).config.decoding.beam_size == 2
    assert load_model(run).config.decoding.max_length_ratio == 1.4


@pytest.mark.parametrize("damage", ["missing", pytest.param("truncated", marks=pytest.mark.slow), "flipped"])
def test_a_damaged_model_folder_is_published_again(make_config, damage):
    run = fit_on_cpu(make_config())
    file = run / "model/model.safetensors"
    good = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(good[:-4] if damage == "truncated" else good[:-1] + bytes([good[-1] ^ 1]))
    fit_on_cpu(make_config())  # a finished run
    assert file.read_bytes() == good


def test_a_damaged_best_checkpoint_is_never_published(make_config, scripted_scores, caplog):
    scripted_scores(*map(with_bleu, (40, 10, 10)))
    run = fit_on_cpu(make_config())
    weights = run / "checkpoints/step-00000004/model.safetensors"
    good = (run / "model/model.safetensors").read_bytes()
    assert good == weights.read_bytes()
    weights.write_bytes(good[:-100] + bytes(100))
    fit_on_cpu(make_config(training={"max_steps": 10}, decoding={"beam_size": 3}))
    assert "model/ is not updated" in caplog.text
    assert (run / "model/model.safetensors").read_bytes() == good
