"""Whether losses and gradients on the device are right, for batches with padding."""

import copy
from statistics import median

import torch
from torch import Tensor

from gpu.scale import CheckFailed, Scale
from mtrain.config.training import TrainingConfig
from mtrain.data.loader import Step
from mtrain.model.transformer import Transformer
from mtrain.training.step import Learner

# Precision, compilation, attention, and the largest acceptable error of the gradients: the median over
# parameters of the relative error of a gradient in the Euclidean norm.
CASES = [("fp32", "off", "default", 2e-3), ("bf16", "off", "default", 5e-2), ("fp16", "off", "default", 2e-2)]
ON_GPU = [("bf16", "off", "cudnn", 5e-2), ("bf16", "on", "default", 5e-2)]


def check(scale: Scale) -> None:
    """Compare with fp64 on the CPU. Raises CheckFailed if an error is larger than rounding explains."""
    config = scale.model_config("small", dropout=0.0, activation_dropout=0.0)
    torch.manual_seed(1)
    model = Transformer(config).train()
    step = scale.steps(config, 2048, 3)[1]
    loss, expected = gradients(model.to(torch.float64), torch.device("cpu"), step, "fp32", "off")
    failed = []
    for precision, compiled, attention, limit in CASES + ON_GPU * scale.on_gpu:
        name = f"{precision}, compile {compiled}, {attention} attention"
        torch.backends.cuda.enable_cudnn_sdp(attention == "cudnn")
        found, ours = gradients(model.to(torch.float32), scale.device, step, precision, compiled)
        errors = [float((g - e).norm() / (e.norm() + 1e-12)) for g, e in zip(ours, expected, strict=True)]
        print(
            f"numbers, {name}: loss {found:.6f} ({loss:.6f} in fp64), relative errors of gradients: "
            f"median {median(errors):.1e}, largest {max(errors):.1e}",
            flush=True,
        )
        if not median(errors) <= limit or not abs(found - loss) <= limit * abs(loss):
            failed.append(name)
    if failed:
        raise CheckFailed(f"gradients are wrong with {'; '.join(failed)}")


def gradients(
    model: Transformer, device: torch.device, step: Step, precision: str, compiled: str
) -> tuple[float, list[Tensor]]:
    """The mean loss of a step in nats per token, and the gradient of each parameter in fp64 on the CPU."""
    dtype = next(model.parameters()).dtype
    copied = copy.deepcopy(model)
    copied.make_positions()
    learner = Learner(
        copied.to(device, dtype), TrainingConfig(max_steps=1, precision=precision, compile=compiled)
    )
    scale, total = learner.loss_scaler.scale, 0.0
    for batch in step.batches:
        loss = learner.loss(copied, batch).loss / step.tokens
        (loss * scale).backward()
        total += float(loss.detach())
    factor = float(scale)
    found = [p.grad.detach().double().cpu() / factor for p in copied.parameters() if p.grad is not None]
    return total, found
