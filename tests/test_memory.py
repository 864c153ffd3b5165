"""The size of a pass, found from what a pass keeps for its backward pass."""

import pytest
import torch

from mtrain.model.transformer import Transformer
from mtrain.schema import ModelConfig, TrainingConfig
from mtrain.training import loop
from mtrain.training.loop import make_trainer
from mtrain.training.memory import fit_pass, memory_of
from mtrain.training.step import Learner


def make_learner(workers: int = 1, d_model: int = 16) -> Learner:
    sizes = {"d_model": d_model, "ffn_dim": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    vocab = {"source_vocab_size": 50, "target_vocab_size": 50, "max_positions": 64}
    return Learner(Transformer(ModelConfig(**sizes, **vocab)).train(), TrainingConfig(max_steps=1), workers)


def test_a_pass_is_halved_until_it_fits_and_holds_a_sentence():
    assert fit_pass(make_learner(), 64, 4096, memory=10**12) == 4096
    sizes = [fit_pass(make_learner(), 64, 4096, memory=10**power) for power in (5, 6, 7, 8, 9)]
    assert sizes == sorted(sizes) and sizes[0] == 64 and sizes[-1] == 4096 and 64 < sizes[2] < 4096
    assert fit_pass(make_learner(workers=4), 64, 4096, memory=10**7) < sizes[2]
    assert fit_pass(make_learner(d_model=64), 64, 4096, memory=10**7) < sizes[2]


def test_memory_is_that_of_the_machine():
    assert 2**28 < memory_of(torch.device("cpu")) < 2**48


@pytest.mark.parametrize("workers", [1, 2])
def test_the_rehearsal_takes_the_largest_batch_and_leaves_no_trace(make_config, workers, monkeypatch):
    monkeypatch.setattr(loop, "workers_for", lambda _: workers)
    trainer = make_trainer(make_config(model={"dropout": 0.3}), device="cpu", quiet=True)
    batch = trainer.feed.largest(0)
    planned = [rows for step in trainer.feed.plan(0).steps for rows in step if len(rows)]
    sizes = [trainer.feed.batch(rows) for rows in planned]
    positions = [each.source.numel() + each.labels.numel() for each in sizes]
    assert batch.source.numel() + batch.labels.numel() == max(positions)
    before = torch.get_rng_state()
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.learner.rehearse(batch)
    assert torch.equal(before, torch.get_rng_state())
    for replica in trainer.learner.replicas:
        assert all(parameter.grad is None for parameter in replica.parameters())
        assert all(torch.equal(*pair) for pair in zip(weights, replica.parameters(), strict=True))


def test_auto_passes_follow_the_memory_and_given_ones_are_kept(make_config, monkeypatch):
    monkeypatch.setattr(loop, "memory_of", lambda _: 2_000_000)
    auto = make_trainer(make_config("auto", training={"batch_tokens": 512}), device="cpu", quiet=True)
    assert auto.feed.pass_tokens < 512
    keys = {"batch_tokens": 512, "micro_batch_tokens": 256}
    assert make_trainer(make_config("own", training=keys), device="cpu", quiet=True).feed.pass_tokens == 256
