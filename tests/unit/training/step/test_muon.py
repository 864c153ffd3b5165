"""Muon beside AdamW."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.device import step_unless
from mtrain.model.transformer import Transformer
from mtrain.training.step.muon import Muon, orthogonalized
from mtrain.training.step.optimizer import make_optimizer

RATE = 0.01


def make_model() -> Transformer:
    torch.manual_seed(1)
    words = {"source_vocab_size": 9, "target_vocab_size": 9, "max_positions": 8}
    model = Transformer(ModelConfig(**words, d_model=16, ffn_dim=32, encoder_layers=1, decoder_layers=1))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def steps_of(
    model: Transformer, count: int = 3, precision: str = "fp32", **settings: object
) -> list[dict[str, Tensor]]:
    """The changes of all parameters in steps with the same gradients."""
    optimizer = make_optimizer(model, TrainingConfig.model_validate(settings), precision)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    changes = []
    for _ in range(count):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone() * (len(changes) + 1)
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
        changes.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
    return changes


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_matrices_keep_their_singular_vectors_and_get_equal_singular_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    left, _, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    x = left @ torch.diag(torch.linspace(0.05, 7, 8).repeat(2)[: left.size(2)].double()) @ right
    found = orthogonalized(x, torch.float64)
    diagonal = left.mT @ found @ right.mT / max(shape[1:]) ** 0.5
    values = diagonal.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(torch.diag_embed(values), diagonal)
    assert values.min() > 0.6 and values.max() < 1.3
    assert found.square().mean().sqrt() == pytest.approx(1, abs=0.2)
    rough = orthogonalized(x.float(), torch.bfloat16)
    assert float((rough - found).norm() / found.norm()) < 0.1


def test_a_matrix_is_updated_as_by_the_muon_of_pytorch() -> None:
    """Which computes in bf16."""
    of_pytorch = pytest.importorskip("torch.optim._muon").Muon
    model = make_model()
    name = "encoder.0.self_attention.output.weight"
    other = copy.deepcopy(dict(model.named_parameters())[name])
    other.grad = dict(model.named_parameters())[name].grad
    optimizer = of_pytorch([other], lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    gradient, changes = other.grad.clone(), []
    for step in range(3):
        before, other.grad = other.detach().clone(), gradient * (step + 1)
        optimizer.step()
        changes.append(other.detach() - before)
    for ours, theirs in zip(steps_of(model, optimizer="muon"), changes, strict=True):
        assert float((ours[name] - theirs).norm() / theirs.norm()) < 0.03


def test_queries_keys_and_values_are_updated_as_matrices_of_their_own() -> None:
    first, *_ = steps_of(make_model(), optimizer="muon")
    for name, parameter in make_model().named_parameters():
        if name.endswith("query_key_value.weight"):
            assert parameter.grad is not None
            expected = [orthogonalized(part[None], torch.float32)[0] for part in parameter.grad.chunk(3)]
            torch.testing.assert_close(first[name], torch.cat(expected) * -0.2 * RATE, rtol=1e-3, atol=1e-6)


def test_only_matrices_of_layers_are_updated_by_muon() -> None:
    changes = [steps_of(make_model(), optimizer=name)[-1] for name in ("adamw", "muon")]
    for name, change in changes[0].items():
        of_muon = name.split(".")[0] in ("encoder", "decoder") and change.dim() == 2
        assert torch.equal(change, changes[1][name]) != of_muon, name


def test_weight_decay_is_relative_to_the_rate() -> None:
    name = "decoder.0.feed_forward.outer.weight"
    [plain], [decayed] = (steps_of(make_model(), 1, optimizer="muon", weight_decay=w) for w in (0.0, 0.5))
    expected = plain[name] - RATE * 0.5 * dict(make_model().named_parameters())[name].detach()
    torch.testing.assert_close(decayed[name], expected)


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_step_that_is_skipped_changes_nothing(value: float) -> None:
    model = make_model()
    steps = steps_of(make_model(), 1, optimizer="muon")
    optimizer = make_optimizer(model, TrainingConfig(optimizer="muon"))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in model.parameters()]
    for skip in (1.0, 0.0):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient * (value if skip else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(RATE)
        step_unless(optimizer, torch.tensor(skip))
        if skip:
            assert all(map(torch.equal, model.parameters(), start))
    for (name, parameter), before in zip(model.named_parameters(), start, strict=True):
        torch.testing.assert_close(parameter.detach() - before, steps[0][name])


@pytest.mark.parametrize(
    ("has_bf16", "in_ranks", "precision"),
    [(True, False, "bf16"), (True, False, "fp32"), (True, True, "bf16"), (False, False, "bf16")],
)
def test_products_are_in_bf16_if_the_cpu_has_instructions_for_it(monkeypatch, has_bf16, in_ranks, precision):
    """Ranks compute in fp32: their CPUs may differ, but their weights must not."""
    [exact] = steps_of(make_model(), 1, optimizer="muon")
    monkeypatch.setattr("mtrain.training.step.muon.cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr("mtrain.training.step.muon.dist.is_initialized", lambda: in_ranks)
    [found] = steps_of(make_model(), 1, precision, optimizer="muon")
    is_exact = all(torch.equal(found[name], change) for name, change in exact.items())
    assert is_exact != (has_bf16 and not in_ranks and precision == "bf16")


def test_threads_share_the_matrices() -> None:
    model = make_model()
    expected = steps_of(make_model(), 1, optimizer="muon")[0]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with ThreadPoolExecutor(2) as pool:
        optimizer = make_optimizer(model, TrainingConfig(optimizer="muon"), "fp32", 3, pool)
        assert isinstance(optimizer, Muon)
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach() - before[name], expected[name])
