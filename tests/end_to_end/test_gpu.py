"""Training and translating on a GPU gives the same as on the CPU."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from mtrain import Translator
from mtrain.device import copy_to_host_async
from mtrain.training.fit import fit, make_trainer
from mtrain.training.step import Learner
from tests.support.training import PAIRS, batches_of, losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_step_gives_the_same_loss_and_weights(parts):
    config, model, data, tokenizer = parts
    batches = batches_of([[0, 1, 2], [3, 4]], data, tokenizer)
    tokens = sum(batch.target_tokens for batch in batches)
    results = {}
    for device in ("cpu", "cuda"):
        moved = copy.deepcopy(model).to(
            device
        )  # in fp64: Adam amplifies gradients that are only rounding errors
        recipe = config.training.model_copy(update={"precision": "fp32", "compile": "off"})
        sums = Learner(moved, recipe).step(batches, tokens, 0.001)
        results[device] = [sums.values.cpu(), *(p.detach().cpu() for p in moved.parameters())]
    for ours, theirs in zip(results["cpu"], results["cuda"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_compiled_steps_of_any_sizes_equal_eager_steps(parts, monkeypatch):
    compiled, real = [], nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda *a, **k: (compiled.append(a), real(*a, **k)))
    config, model, data, tokenizer = parts
    splits = ([[0, 1, 2], [3, 4]], [[5, 6, 7]], [[0]], [[1, 7, 2, 6, 3]])
    results = {}
    for setting in ("off", "on"):
        recipe = config.training.model_copy(update={"precision": "fp32", "compile": setting})
        compiled.clear()
        learner = Learner(copy.deepcopy(model).float().to("cuda"), recipe)
        assert bool(compiled) == (setting == "on")
        results[setting] = []
        for split in splits:
            batches = batches_of(split, data, tokenizer)
            sums = learner.step(batches, sum(batch.target_tokens for batch in batches), 1e-6)
            results[setting].append(sums.values.cpu())
    torch.testing.assert_close(results["on"], results["off"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_never_waits_for_the_device(parts, precision):
    config, model, data, tokenizer = parts
    recipe = config.training.model_copy(update={"precision": precision, "clip_norm": 1.0, "compile": "off"})
    learner = Learner(model.float().to("cuda"), recipe)
    batches = [batch.pinned() for batch in batches_of([[0, 1, 2], [3, 4]], data, tokenizer)]
    tokens = sum(batch.target_tokens for batch in batches)
    learner.step(batches, tokens, 0.001)  # the first step initializes libraries
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = copy_to_host_async(learner.step(batches, tokens, 0.001).values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read()[0] > 0


def test_batches_are_in_pinned_memory(make_config):
    trainer = make_trainer(make_config(), device="cuda")
    batch = trainer.loader.largest(trainer.loader.open(0))[0]
    assert batch.source.is_pinned() and batch.split(0)[-1].labels.is_pinned()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_translations_equal_those_of_the_cpu(run_dir, precision):
    translator = Translator.load(run_dir, "cuda", [f"decoding.precision={precision}"])
    assert [t.text for t in translator.translate([source for source, _ in PAIRS])] == [
        pair[1] for pair in PAIRS
    ]


def test_a_run_with_every_dropout_trains_in_bf16_and_resumes(make_config, caplog):
    caplog.set_level("INFO", "mtrain")
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "word_dropout": 0.1}
    recipe = {"r_drop": 1.0, "precision": "bf16"}
    for steps in (8, 40):
        config = make_config(model=rates, training={**recipe, "max_steps": steps})
        fit(config, device="cuda")
    history = losses(Path(config.run_dir))
    assert "resuming, but not bit-identically" in caplog.text
    assert history[-1][0] == 40 and history[-1][3] < history[0][3]
