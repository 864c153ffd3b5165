"""Which architectures the formats of `mtrain export` can hold."""

import importlib
from types import ModuleType
from typing import get_args

from mtrain.config.schema import Architecture, Config, Format
from mtrain.errors import UsageError


def obstacle(model: Architecture, format: Format) -> str | None:
    """What keeps a model of this architecture from being exported; None if nothing does."""
    if format == "ctranslate2":  # knows every norm, activation and kind of positions that mtrain does
        return None
    if model.norm != "post":
        return "model.norm must be post"
    if model.positions != "sinusoidal":
        return "model.positions must be sinusoidal"
    return "model.activation must not be swiglu" if model.activation == "swiglu" else None


def require_exports(config: Config) -> None:
    """Raise UsageError if the model that is to be trained will not allow the exports that are required."""
    for format in config.export.require:
        if reason := obstacle(config.model, format):
            raise UsageError(f"export.require: no {format} export of this model: {reason}")


def exports_of(model: Architecture) -> str:
    """Which exports a model allows, in words."""
    reasons = {format: obstacle(model, format) for format in get_args(Format)}
    return ", ".join(f"{name}: {f'no ({reason})' if reason else 'yes'}" for name, reason in reasons.items())


def needed(module: str) -> ModuleType:
    """A module of a package that not everybody has. Raises UsageError saying how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UsageError(f"{package} is needed for this: pip install 'mtrain[interop]' ({error})") from None
