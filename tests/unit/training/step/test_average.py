"""Averages of weights: how they are computed, and that they are validated, published and loaded."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from mtrain.checkpoint.model_folder import load_model
from mtrain.errors import UsageError
from mtrain.processes.stop_signals import StopSignal
from mtrain.training.fit import fit, make_trainer
from mtrain.training.loop import train, train_step
from mtrain.training.model_selection import ModelSelection
from mtrain.training.step.learner import Learner
from tests.support.training import weights


def test_the_moving_average_covers_all_steps(make_config):
    trainer = make_trainer(make_config(training={"ema_decay": 0.7}), device="cpu")
    expected = weights(trainer.model)
    steps = trainer.steps()
    for number in range(1, 41):  # the decay rises until step 20
        train_step(trainer, next(steps))
        decay = min(0.7, (1 + number) / (10 + number))
        now = weights(trainer.model)
        expected = {name: decay * old + (1 - decay) * now[name] for name, old in expected.items()}
    for name, value in trainer.average.weights.items():
        torch.testing.assert_close(value, expected[name])
        assert not torch.equal(value, now[name])


def test_average_checkpoints_is_the_mean_of_the_newest(make_config):
    recipe = {"average_checkpoints": 3, "max_steps": 16, "patience": None, "best_metric": "nll"}
    config = make_config(training=recipe)
    fit(config, device="cpu")
    folders = sorted(Path(config.run_dir, "checkpoints").glob("step-*"))[-3:]
    assert [folder.name for folder in folders] == [f"step-{step:08d}" for step in (8, 12, 16)]
    own = [load_file(folder / "model.safetensors") for folder in folders]
    for name, mean in load_file(folders[-1] / "average.safetensors").items():
        torch.testing.assert_close(mean, sum(tensors[name] for tensors in own) / 3)


def test_a_checkpoint_whose_save_is_repeated_counts_once(make_config):
    """If its folder is complete, but the index of the checkpoints could not be written."""
    config = make_config(training={"average_checkpoints": 2, "max_steps": 8, "best_metric": "nll"})
    fit(config, device="cpu")
    run, trainer = Path(config.run_dir), make_trainer(config, device="cpu")
    trainer.average.average_checkpoints(run, trainer.state.step, trainer.ranks)
    expected = load_file(run / "checkpoints/step-00000008/average.safetensors")
    torch.testing.assert_close(trainer.average.weights, expected)


def test_the_mean_is_freed_before_the_next_step(make_config, monkeypatch):
    """The mean takes as much memory as the weights, and the dry run of a step does not count it."""
    held = []
    real = Learner.step

    def step(learner, *arguments):
        held.append(len(trainer.average.weights))
        return real(learner, *arguments)

    monkeypatch.setattr(Learner, "step", step)
    recipe = {"average_checkpoints": 2, "best_metric": "nll"}
    for max_steps in (4, 12):  # begun, resumed
        config = make_config(training={**recipe, "max_steps": max_steps})
        trainer = make_trainer(config, device="cpu")
        with StopSignal() as stop:
            train(trainer, stop)
    assert held == [0] * 12
    assert load_file(Path(config.run_dir, "checkpoints/step-00000012/average.safetensors"))


def test_a_damaged_checkpoint_is_left_out_of_the_mean(make_config, caplog):
    keys = {"average_checkpoints": 3, "patience": None, "best_metric": "nll", "keep_checkpoints": 3}
    config = make_config(training={**keys, "max_steps": 8})
    fit(config, device="cpu")
    folders = [Path(config.run_dir, f"checkpoints/step-{step:08d}") for step in (4, 8, 12)]
    weights = folders[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    fit(make_config(training={**keys, "max_steps": 12}), device="cpu")
    assert "model.safetensors: damaged" in caplog.text and "left out of the average" in caplog.text
    own = [load_file(folder / "model.safetensors") for folder in folders[1:]]
    for name, mean in load_file(folders[2] / "average.safetensors").items():
        torch.testing.assert_close(mean, sum(tensors[name] for tensors in own) / 2)


@pytest.mark.parametrize(
    "keys", [{"ema_decay": 0.8}, pytest.param({"average_checkpoints": 2}, marks=pytest.mark.slow)]
)
def test_the_average_is_validated_and_published_and_training_continues_from_the_last_weights(
    make_config, keys, monkeypatch
):
    seen = []
    validate = ModelSelection.scores_of

    def spy(self, model):
        seen.append(weights(model))
        return validate(self, model)

    monkeypatch.setattr(ModelSelection, "scores_of", spy)
    config = make_config(training={**keys, "best_metric": "nll"})
    fit(config, device="cpu")
    run = Path(config.run_dir)
    best = run / "checkpoints" / json.loads((run / "checkpoints/index.json").read_text())["best"]
    validated = seen[int(best.name[5:]) // 4 - 1]
    for source in (weights(load_model(run).model), load_file(best / "average.safetensors")):
        assert all(torch.equal(validated[name], tensor) for name, tensor in source.items())
    plain = make_config("plain", training={"best_metric": "nll"})
    fit(plain, device="cpu")
    names = [Path(folder, "checkpoints/step-00000008/model.safetensors") for folder in (run, plain.run_dir)]
    assert names[0].read_bytes() == names[1].read_bytes()
    (run / "model").rename(run / "gone")  # without it, the best checkpoint is loaded
    assert all(torch.equal(validated[name], t) for name, t in weights(load_model(run).model).items())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ema_decay": 0.9, "average_checkpoints": 2}, "mutually exclusive"),
        ({"average_checkpoints": 9}, "keep_checkpoints"),
    ],
)
def test_contradictory_settings_are_errors(make_config, keys, message):
    with pytest.raises((UsageError, ValidationError), match=message):
        make_config(training=keys)
