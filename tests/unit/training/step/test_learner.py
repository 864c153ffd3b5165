"""One optimizer step: accumulation, R-Drop, the loss scale, workers, weight decay."""

import threading

import pytest
import torch

from mtrain.config.sections.model import ModelConfig
from mtrain.model.transformer import Dropout, Transformer
from mtrain.training.step.learner import Learner
from mtrain.training.step.optimizer import LossScaler, make_optimizer
from tests.support.training import Poisoned, batches_of


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_accumulated_micro_batches_equal_one_batch(parts, workers):
    config, model, data, tokenizer = parts
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes = []
    for split in ([[0, 1, 2, 3, 4, 5, 6, 7]], [[6], [0, 1, 2], [7, 3], [4, 5]]):  # of unequal token counts
        model.load_state_dict(before)
        batches = batches_of(split, data, tokenizer)
        tokens = sum(batch.target_tokens for batch in batches)
        learner = Learner(model, config.training, workers)
        learner.optimizer = torch.optim.SGD(model.parameters(), fused=True)
        sums = learner.step(batches, tokens, 1.0)
        changes.append(
            {name: p.detach() - before[name] for name, p in model.named_parameters()} | {"loss": sums.values}
        )
    assert changes[0].keys() == changes[1].keys()
    for name, change in changes[0].items():
        torch.testing.assert_close(change, changes[1][name], rtol=1e-10, atol=1e-12)
        assert change.abs().max() > 0


def test_the_encoder_is_frozen_and_then_trained_at_a_share_of_the_rate(parts):
    config, model, data, tokenizer = parts
    learner = Learner(model, config.training.model_copy(update={"encoder_after": 3, "weight_decay": 0.1}))
    [batch] = batches_of([[0, 1, 2]], data, tokenizer)
    largest = []
    for share in (0.0, 0.01, 1.0):
        learner.encoder_share = share
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        learner.step([batch], batch.target_tokens, 1e-3)
        changes = {
            name: float((p.detach() - before[name]).abs().max()) for name, p in model.named_parameters()
        }
        of_encoder = [change for name, change in changes.items() if name.startswith("encoder")]
        assert min(change for name, change in changes.items() if not name.startswith("encoder")) > 0
        largest.append(max(of_encoder))
        assert (min(of_encoder) > 0) == (share > 0)
    assert largest[0] == 0 and 10 * largest[1] < largest[2]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_r_drop_changes_the_loss_only_with_dropout(parts, workers):
    config, model, data, tokenizer = parts
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(rate, split, **keys):
        model.load_state_dict(start)
        for module in model.modules():
            if isinstance(module, Dropout):
                module.rate = rate
        batches = batches_of(split, data, tokenizer)
        learner = Learner(model, config.training.model_copy(update=keys), workers)
        learner.optimizer = torch.optim.SGD(model.parameters(), fused=True)
        torch.manual_seed(3)
        values = learner.step(batches, sum(batch.target_tokens for batch in batches), 1.0).values
        return values, [p.detach().clone() for p in model.parameters()]

    whole, cut = [[0, 1, 2, 3, 4, 5, 6, 7]], [[6], [0, 1, 2], [7, 3], [4, 5]]  # of unequal token counts
    ordinary = step(0.0, whole)
    for split in (whole, cut):
        torch.testing.assert_close(step(0.0, split, r_drop=5.0), ordinary, rtol=1e-9, atol=1e-12)
        (loss, nll, *_), _ = step(0.3, split, r_drop=1e-9)
        (with_alpha, same_nll, *_), _ = step(0.3, split, r_drop=5.0)
        assert same_nll == nll  # the same dropout
        assert with_alpha > loss > ordinary[0][0]


def test_each_setting_of_the_step_has_an_effect(parts):
    config, model, data, tokenizer = parts
    model = model.float()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(**keys):
        model.load_state_dict(start)
        recipe = config.training.model_copy(update=keys)
        batches = batches_of([[0, 1, 2, 3]], data, tokenizer)
        learner = Learner(model, recipe)
        learner.optimizer = torch.optim.SGD(model.parameters(), fused=True)
        sums = learner.step(batches, batches[0].target_tokens, 0.5)
        moved = sum(float((p.detach() - start[name]).square().sum()) for name, p in model.named_parameters())
        return sums.values[0], sums.values[1], sums.values[2], moved**0.5

    loss, nll, norm, moved = step(label_smoothing=0.0)
    assert loss == nll and moved == pytest.approx(0.5 * float(norm), rel=1e-3)
    smoothed, same_nll, *_ = step(label_smoothing=0.2)
    assert smoothed > loss and same_nll == nll
    *_, norm, moved = step(clip_norm=0.01)
    assert norm > 0.01 and moved == pytest.approx(0.5 * 0.01, rel=1e-3)
    # With smoothing, whose part of the loss is large: the model has memorized the pairs, and rounding to bf16
    # is not small beside a negative log-likelihood of nearly zero.
    rough, *_ = step(precision="bf16", label_smoothing=0.2)
    assert rough != smoothed and rough == pytest.approx(float(smoothed), rel=0.1)
    betas = make_optimizer(model, config.training.model_copy(update={"betas": (0.8, 0.9)})).defaults["betas"]
    assert betas == (0.8, 0.9)


def test_fp16_halves_the_loss_scale_on_overflow_and_doubles_it_later(parts, monkeypatch):
    config, model, data, tokenizer = parts
    recipe = config.training.model_copy(update={"precision": "fp16"})
    batch = batches_of([[0, 1, 2]], data, tokenizer)
    model = Poisoned(model.float())
    learner, plain = Learner(model, recipe), Learner(model, config.training)
    monkeypatch.setattr(LossScaler, "GROWTH_INTERVAL", 2)
    factors, norms = [], []
    for poison in (True, False, False, False):
        model.poison = poison
        norms.append(float(learner.step(batch, batch[0].target_tokens, 0.0).values[2]))
        factors.append(learner.loss_scaler.state()[0])
    assert factors == [32768, 32768, 65536, 65536]
    expected = plain.step(batch, batch[0].target_tokens, 0.0).values
    assert norms[1] == pytest.approx(float(expected[2]), rel=0.02)  # unscaled before it is clipped
    assert plain.loss_scaler.state() == []  # else a run resumed in fp16 would start with a scale of 1
    other = Learner(model, recipe)
    other.loss_scaler.restore(learner.loss_scaler.state())
    assert other.loss_scaler.state() == learner.loss_scaler.state() == [65536, 1]


def test_the_optimizer_runs_in_the_thread_of_one_worker(parts, monkeypatch):
    """With all cores, threads would wait for each other at every parameter."""
    config, model, data, tokenizer = parts
    learner, threads = Learner(model, config.training, workers=2), []
    real = learner.optimizer.step

    def step():
        threads.append(threading.current_thread().name)
        real()

    monkeypatch.setattr(learner.optimizer, "step", step)
    learner.step(batches_of([[0, 1], [2, 3]], data, tokenizer), 9, 0.1)
    assert len(threads) == 1 and threads[0].startswith("mtrain_")


def test_an_error_in_a_worker_is_raised(parts, on_training_forward):
    config, model, data, tokenizer = parts
    learner = Learner(model, config.training, workers=2)
    batches = batches_of([[0, 1], [2, 3]], data, tokenizer)

    def fail(*_):
        raise MemoryError

    on_training_forward(fail)
    with pytest.raises(MemoryError):
        learner.step(batches, 9, 0.1)


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
def test_weight_decay_applies_to_matrices_and_embeddings_only(make_config, tie):
    words = {"source_vocab_size": 9, "target_vocab_size": 9, "max_positions": 8, "output_bias": True}
    model = Transformer(ModelConfig(**words, d_model=8, ffn_dim=12, positions="learned", tie_embeddings=tie))
    groups = make_optimizer(model, make_config(training={"weight_decay": 0.1}).training).param_groups
    groups.sort(key=lambda group: group["weight_decay"])
    assert [group["weight_decay"] for group in groups] == [0.0, 0.1]
    spared, decayed = ({id(p) for p in group["params"]} for group in groups)
    assert len(decayed) + len(spared) == len(list(model.parameters())) and not decayed & spared
    for name, parameter in model.named_parameters():
        small = "norm" in name or name.endswith("bias")
        assert id(parameter) in (spared if small else decayed), name
