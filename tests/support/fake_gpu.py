"""A GPU in name only: its tensors have no data, so that a step of a large model takes a second or two.

PyTorch's FakeTensorMode computes shapes, data types and devices, and raises an error where a GPU would: if
tensors on different devices or of different types meet, and where the host would wait for a value. `NoWaits`
finds the other waits. The device is PyTorch's type for extensions, "PrivateUse1": a build without CUDA cannot
compute gradients on CUDA devices. mtrain treats it like a CUDA device in all that a step does.

`main` registers the device, which cannot be undone, so it runs in a process of its own:
    python -m tests.support.fake_gpu
It prints what each check found, as JSON: {name of the check: "" or the error}.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtrain.config.section import Precision
from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.presets import PRESETS
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.batching import Batch
from mtrain.decoding.search.predictor import Predictor
from mtrain.kernels.topk import logsumexp
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.transformer import Transformer
from mtrain.training.step import optimizer
from mtrain.training.step.learner import Learner

NAME = "gpu"
Fault = Callable[[Tensor], object]  # what a forward pass should not do, with the states of the encoder
# What autocast does on CUDA devices, as PyTorch documents it, for the operations that mtrain uses.
IN_LOW_PRECISION = "addmm bmm baddbmm linear matmul mm scaled_dot_product_attention"
# What PyTorch says it refuses in its deterministic mode on CUDA devices, for numbers that are not integers.
REFUSED = {"cumsum", "put_", "histc", "bincount", "median", "nll_loss2d_forward", "scatter_reduce"}
IN_FP32 = "cumsum exp layer_norm log log_softmax pow prod softmax sum"


class _Module:
    """What `torch.gpu` offers."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    _is_in_bad_fork = staticmethod(lambda: False)


class _Mode(FakeTensorMode):
    avoid_device_init = True  # `torch.tensor` then makes its value on the CPU, and copies it

    def __deepcopy__(self, _: dict[int, Any]) -> "_Mode":
        return self  # copied tensors belong to it, too


def _register() -> list[torch.library.Library]:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    torch.utils._foreach_utils._foreach_supported_types.append(FakeTensor)
    others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(torch.library.fallthrough_kernel)
    converting = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, is_low in ((IN_LOW_PRECISION, True), (IN_FP32, False)):
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                if overload in ("default", "int", "dim_IntList", "Tensor_Scalar"):
                    operation = getattr(packet, overload)
                    converting.impl(operation, _converting(operation, is_low))
    return [others, converting]  # they are in effect while they exist


def _converting(operation: Any, is_low: bool) -> Callable[..., Any]:
    """An operation with its arguments in the type that autocast chooses."""
    autocast: Any = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(autocast.AutocastPrivateUse1)

    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
            return x
        return x.to(torch.get_autocast_dtype(NAME) if is_low else torch.float32)

    def converted(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*map(convert, arguments), **{k: convert(v) for k, v in options.items()})

    return converted


class NoWaits(TorchDispatchMode):
    """Raises RuntimeError for copies between the device and the host, and for indices on the host. The first
    `reads` values that are read are 0; FakeTensorMode raises an error for others."""

    def __init__(self, reads: int = 0):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and self.reads:
            self.reads -= 1
            return 0
        out = function(*args, **(kwargs or {}))
        is_copy = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors if x.dim() or is_copy}
        if len(devices) > 1:
            raise RuntimeError(f"{function} uses tensors on {' and '.join(sorted(devices))}")
        return out


class FixedOrder(TorchDispatchMode):
    """Raises RuntimeError for operations on numbers that add in an order that varies."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in REFUSED and any(
            x.is_floating_point() for x in tree_leaves(out)
        ):
            raise RuntimeError(f"{function} has no fixed order")
        return out


def make_model(**changes: Any) -> Transformer:
    """A model with the sizes of `base`, but fewer layers: all layers are equal."""
    sizes = PRESETS["base"] | {"encoder_layers": 1, "decoder_layers": 1} | changes
    vocabulary = {"source_vocab_size": 32000, "target_vocab_size": 32000, "max_positions": 512}
    return Transformer(ModelConfig(**sizes, **vocabulary))


def train(
    precision: Precision,
    steps: int = 1,
    fault: Fault | None = None,
    r_drop: float = 0.0,
    optimizer: Literal["adamw", "muon"] = "adamw",
    **sizes: Any,
) -> None:
    """Take training steps of two micro-batches. `fault` happens in each forward pass."""
    with torch.device(NAME):
        model = make_model(attention_dropout=0.1, word_dropout=0.1, **sizes).train()
        batches = [Batch.of_size(160, 26), Batch.of_size(40, 101)]
    if fault is not None:
        model.encoder_norm.register_forward_hook(lambda module, inputs, output: fault(output) and None)
    recipe = {"precision": precision, "r_drop": r_drop, "optimizer": optimizer, "weight_decay": 0.1}
    learner = Learner(model, TrainingConfig(max_steps=2, clip_norm=1.0, **recipe))
    for _ in range(steps):
        with NoWaits(), FixedOrder():
            metrics = learner.step(batches, 8200, 1e-3)
        assert metrics.values.device.type == NAME


@torch.no_grad()
def decode(dtype: torch.dtype | None, beams: int, **sizes: Any) -> None:
    """Encode, and take decoding steps: all that they do but the decision which sentences are finished."""
    with torch.device(NAME):
        model = DecodingTransformer(make_model(**sizes).eval(), dtype)
        source = torch.zeros(64, 28, dtype=torch.int64)
        keep, last, live = source == 0, source.new_zeros(64 * beams), torch.zeros(64, beams)
    with NoWaits(reads=1):  # whether the batch has padding
        predictor = Predictor([model], source, keep, beams, 40)
    with NoWaits():
        for _ in range(2):
            logits = predictor.step(last)
            last, _ = predictor.argmax(logits)
            if beams > 1:
                live, parents, tokens = predictor.topk(logits, logsumexp(logits), live, beams)
                live, parents, tokens = (x[:, :beams] for x in (live, parents, tokens))
                last = tokens.flatten()
                predictor.reorder(parents)
        logits, attention = predictor.step_with_attention(last)
    assert logits.dtype == torch.float32 and attention.shape == (64 * beams, 28)


def _product_of_two_types(x: Tensor) -> Tensor:
    with torch.autocast(NAME, enabled=False):
        return x.to(torch.bfloat16)[None] @ x.float().t()[None]  # of products, only batched ones are checked


POST_NORM = {"norm": "post", "positions": "learned", "activation": "swiglu"}
UNTIED = {"tie_embeddings": "none", "output_bias": True}
CHECKS: dict[str, Callable[[], None]] = {
    "training in bf16": partial(train, "bf16", steps=2),
    "training in fp16, another architecture": partial(train, "fp16", r_drop=1.0, **POST_NORM, **UNTIED),
    "training in bf16 with Muon": partial(train, "bf16", steps=2, optimizer="muon"),
    "training in fp32, rotary positions": partial(
        train, "fp32", positions="rotary", tie_embeddings="decoder"
    ),
    "greedy search in bf16": partial(decode, torch.bfloat16, 1),
    "greedy search in fp32, rotary positions": partial(decode, None, 1, positions="rotary"),
    "beam search in bf16": partial(decode, torch.bfloat16, 5),
    "beam search in fp32, another architecture": partial(decode, None, 5, **POST_NORM, **UNTIED),
}
FAULTS: dict[str, Fault] = {
    "a value is read": lambda x: x.sum().item(),
    "a branch depends on a value": lambda x: bool(x.isfinite().all()),
    "a shape depends on values": Tensor.nonzero,
    "the order of a sum varies": lambda x: x.cumsum(0),
    "a tensor is copied to the host": Tensor.cpu,
    "a tensor is copied to the device": lambda x: torch.zeros(3).to(x.device),
    "an index is on the host": lambda x: x[torch.arange(3)],
    "a tensor is on the host": lambda x: x + torch.ones(x.size(-1)),
    "a condition is on the host": lambda x: torch.where(torch.ones(x.size(-1)) > 0, x, x),
    "a product has two types": _product_of_two_types,
}


def _fused(make: type[torch.optim.AdamW], *arguments: Any, **options: Any) -> torch.optim.AdamW:
    return make(*arguments, **{**options, "fused": True})


def main() -> None:
    """Run all checks, and training in bf16 with each fault."""
    _libraries, mode = _register(), _Mode()
    # As on CUDA devices; `make_optimizer` asks for it by the name of the device.
    torch.optim.AdamW = partial(_fused, torch.optim.AdamW)  # type: ignore[misc]
    optimizer.Muon = partial(_fused, optimizer.Muon)  # type: ignore[attr-defined]
    found = {}
    faulty = {name: partial(train, "bf16", fault=fault) for name, fault in FAULTS.items()}
    for name, check in (CHECKS | faulty).items():
        found[name] = ""
        try:
            with mode:
                check()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
