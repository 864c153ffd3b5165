"""Devices without fp64 never compute in it, products of numbers in low precision are not rounded, and under
autocast the types of products are known."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtrain import Translator
from mtrain.decoding.scoring.score import score_pairs
from mtrain.kernels import precision
from mtrain.kernels.precision import product_dtype, product_fp32, widest_float, without_autocast
from mtrain.model.transformer import Transformer
from mtrain.training.step.learner import Learner
from tests.support.training import PAIRS, batches_of


class WithoutFp64(TorchDispatchMode):
    """Fails if an operation returns fp64 numbers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        assert all(x.dtype != torch.float64 for x in tensors), function
        return result


@pytest.fixture(autouse=True)
def _cpu_without_fp64(monkeypatch):
    monkeypatch.setattr(precision, "WITHOUT_FP64", {"cpu"})


def test_devices_without_fp64():
    assert widest_float(torch.device("cpu")) == torch.float32
    assert widest_float(torch.device("cuda")) == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_are_not_rounded(dtype: torch.dtype, device: str):
    torch.manual_seed(1)
    a, b = torch.randn(33, 64, device=device).to(dtype).t(), torch.randn(33, 48, device=device).to(dtype)
    product, exact = product_fp32(a, b), a.double() @ b.double()
    assert product.dtype == torch.float32 and (product - exact).norm() < 1e-6 * exact.norm()
    assert torch.equal(product_fp32(a.double(), b.double()), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_have_the_type_of_autocast_only_where_it_is_enabled(dtype):
    x = torch.ones(2, 2)
    assert product_dtype(x) == (x @ x).dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        assert product_dtype(x) == (x @ x).dtype == dtype
        with without_autocast(x):
            assert product_dtype(x) == (x @ x).dtype == torch.float32


def test_devices_without_autocast_are_supported():
    x = torch.ones(2, 2, device="meta")
    with without_autocast(x):
        assert product_dtype(x) == (x @ x).dtype == torch.float32


@pytest.mark.parametrize(
    "search",
    [
        ["beam_size=1"],
        ["beam_size=3", "coverage_penalty=0.2", "no_repeat_ngram=3", "min_length_ratio=0.1"],
        ["samples=3", "top_p=0.9", "top_k=5"],
    ],
)
def test_translation(run_dir, search):
    overrides = [f"decoding.{value}" for value in ("precision=fp32", *search)]
    with Translator.load(run_dir, "cpu", overrides, workers=1) as translator, WithoutFp64():
        translator.translate([source for source, _ in PAIRS])
        assert len(list(score_pairs(translator, PAIRS))) == len(PAIRS)


def test_training(parts):
    config, model, data, tokenizer = parts
    architecture = model.config.model_copy(update={"positions": "rotary", "attention_dropout": 0.1})
    model = Transformer(architecture).train()
    recipe = config.training.model_copy(update={"precision": "fp32", "r_drop": 5.0, "clip_norm": 1.0})
    learner = Learner(model, recipe)
    batches = batches_of([[0, 1, 2], [3, 4]], data, tokenizer)
    with WithoutFp64():
        assert (
            learner.step(batches, sum(batch.target_tokens for batch in batches), 0.1).values.isfinite().all()
        )
