"""The optimizer, loss scaling for fp16, and which parameters are trained."""

import re
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.config.sections.training import ModelPart, TrainingConfig
from mtrain.errors import UsageError
from mtrain.training.step.muon import Muon


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2).

    The scale is halved when a gradient overflows and doubled after `GROWTH_INTERVAL` finite steps. In other
    precisions it is 1. `torch.amp.GradScaler` skips a step only for non-finite gradients and only if enabled,
    whereas here a non-finite loss or gradient norm skips the step in every precision. The state changes in
    place: CUDA graphs know its addresses.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, device: torch.device, enabled: bool):
        self.enabled = enabled
        self.scale = torch.tensor(65536.0 if enabled else 1.0, device=device)
        self.finite_steps = torch.zeros((), device=device)  # finite steps since the scale changed

    def state(self) -> list[float]:
        """The state to save in a checkpoint; empty if disabled. Synchronizes with the device."""
        return [float(self.scale), float(self.finite_steps)] if self.enabled else []

    def restore(self, state: list[float]) -> None:
        """Restore a state that `state` returned."""
        if self.enabled and state:
            self.scale.fill_(state[0])
            self.finite_steps.fill_(state[1])

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after a step; `found_inf` is 1 if its loss or gradient was not finite, else 0."""
        if self.enabled:
            self.finite_steps.add_(1).mul_(1 - found_inf)
            grow = (self.finite_steps >= self.GROWTH_INTERVAL).float()
            self.scale.mul_((1 - found_inf / 2) * (1 + grow)).clamp_(min=1.0)
            self.finite_steps.mul_(1 - grow)


def make_optimizer(
    model: nn.Module,
    config: TrainingConfig,
    precision: str = "fp32",
    workers: int = 1,
    pool: Executor | None = None,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019), with Muon for the matrices of layers if so configured. Weight decay
    applies to matrices, embeddings included, but not to biases and norms, as in nanoGPT. For the other
    arguments, see `Muon`."""
    is_muon = config.optimizer == "muon"
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.dim() > 1
            options = {
                "weight_decay": config.weight_decay if is_matrix else 0.0,
                # Only with `encoder_after`, the encoder is trained at other rates.
                "is_encoder": bool(config.encoder_after and re.match(_PARTS["encoder"], name)),
                "uses_muon": bool(is_muon and is_matrix and re.match(r"(en|de)coder\.", name)),
            }
            group = groups.setdefault((*options.values(),), {"params": [], **options})
            group["params"].append(parameter)
    # On these devices, fused optimizers are known to skip steps; see `step_unless`.
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    # Each step sets the learning rate.
    common: dict[str, Any] = {"lr": 0.0, "betas": config.betas, "eps": 1e-9, "fused": fused}
    if is_muon:
        return Muon([*groups.values()], precision, workers, pool, **common)
    return torch.optim.AdamW([*groups.values()], **common)


# How the names of the parameters of each part of `training.freeze` begin, as regular expressions.
_PARTS: dict[ModelPart, str] = {
    "encoder": "encoder[._]",
    "decoder": "decoder[._]",
    "embeddings": "source_embedding|target_embedding|learned_",
    "self_attention": r"\w+\.\d+\.self_attention",
    "feed_forward": r"\w+\.\d+\.feed_forward",
}


def parameters_of(model: nn.Module, part: ModelPart) -> list[nn.Parameter]:
    """The parameters of a part of a model."""
    return [parameter for name, parameter in model.named_parameters() if re.match(_PARTS[part], name)]


def freeze(model: nn.Module, parts: list[ModelPart]) -> None:
    """Exclude parts of a model from training. A tied output projection belongs to the embeddings.

    Raises UsageError if nothing is left to train.
    """
    frozen = {id(parameter) for part in parts for parameter in parameters_of(model, part)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) not in frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"training.freeze: {', '.join(parts)} leave nothing to train")
