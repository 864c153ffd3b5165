"""Loads tensors from safetensors files."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mtrain.config.sections.model import ModelConfig
from mtrain.distributed.shards import divided_like, has_shards
from mtrain.errors import ModelError
from mtrain.model.build import AnyModel, build_model

_INITIALIZERS = {nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_}


class _SkipInitialization(TorchFunctionMode):
    """Leaves parameters as they are. On the meta device, random initialization would import PyTorch's
    compiler, which takes longer than loading a model."""

    def __torch_function__(self, function: Any, _: object, args: Any = (), keys: Any = None) -> Any:
        if function in _INITIALIZERS:
            return args[0] if args else keys["tensor"]
        return function(*args, **(keys or {}))


def model_without_weights(config: ModelConfig) -> AnyModel:
    """A model on the meta device: its parameters have shapes but no memory."""
    with torch.device("meta"), _SkipInitialization():
        return build_model(config)


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file, by name. Raises ModelError if it cannot be read."""
    try:
        return load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{file}: cannot read: {error}") from None


def load_weights(model: nn.Module, file: Path) -> None:
    """Load the weights of a model from a safetensors file. Parameters on the meta device are replaced.

    The file is mapped into memory: names and shapes are checked before any contents are read. Raises
    ModelError naming the tensors that are missing, unexpected, of another shape, or not finite.
    """
    expected, tensors = model.state_dict(), load_tensors(file)
    if tensors.keys() != expected.keys():
        missing = sorted(expected.keys() - tensors) or "none"
        extra = sorted(tensors.keys() - expected) or "none"
        raise ModelError(f"{file}: missing tensors: {missing}; unexpected tensors: {extra}")
    for name, tensor in tensors.items():
        if tensor.shape != (wanted := expected[name].shape):
            raise ModelError(f"{file}: {name} has shape {[*tensor.shape]}; expected {[*wanted]}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ModelError(f"{file}: {name} contains NaN, infinity or integers")
        tensors[name] = tensor.to(expected[name].dtype)
        if has_shards(expected[name]):
            tensors[name] = divided_like(tensors[name], expected[name])
    model.load_state_dict(tensors, assign=any(tensor.is_meta for tensor in expected.values()))
