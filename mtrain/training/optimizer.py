"""The optimizer, and which parameters it trains."""

import torch
from torch import nn

from mtrain.config.training import Part, TrainingConfig
from mtrain.device import has_fused_optimizers
from mtrain.errors import UsageError


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019). Weight decay applies to matrices, embeddings included, but not to
    biases and norms, as in nanoGPT."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    fused = has_fused_optimizers(next(model.parameters()).device)
    # Each step sets the learning rate.
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=1e-9, fused=fused)


# Prefixes of the parameters that belong to each part of `training.freeze`.
_PARTS: dict[Part, tuple[str, ...]] = {
    "encoder": ("encoder.", "encoder_norm."),
    "decoder": ("decoder.", "decoder_norm."),
    "embeddings": ("source_embedding.", "target_embedding.", "learned_"),
}


def freeze(model: nn.Module, parts: list[Part]) -> None:
    """Exclude parts of a model from training. A tied output projection belongs to the embeddings.

    Raises UsageError if nothing is left to train.
    """
    prefixes = tuple(prefix for part in parts for prefix in _PARTS[part])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"training.freeze: {', '.join(parts)} leave nothing to train")
