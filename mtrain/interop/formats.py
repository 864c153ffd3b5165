"""The architectures that each format of `mtrain export` supports."""

import importlib
from types import ModuleType
from typing import get_args

from mtrain.config.schema import Config, Format
from mtrain.config.sections.model import Architecture
from mtrain.errors import UsageError

# Of exported sinusoidal encodings, which are constants there. Longer texts are an error in other programs, or
# are encoded in another way.
MIN_POSITIONS = 1024


def unsupported_reason(model: Architecture, format: Format) -> str | None:
    """Why a format does not support an architecture; None if it does."""
    if model.is_classifier:
        return "model.head must be translation"
    if format == "ctranslate2":  # supports every other option of Architecture
        return None
    if model.norm != "post":
        return "model.norm must be post"
    if model.positions != "sinusoidal" or model.first_position:
        return "model.positions must be sinusoidal" + (" and start at 0" if model.first_position else "")
    return "model.activation must not be swiglu" if model.activation == "swiglu" else None


def require_exports(config: Config) -> None:
    """Raise UsageError if the architecture rules out a format in `export.require`."""
    for format in config.export.require:
        if reason := unsupported_reason(config.model, format):
            raise UsageError(f"export.require: {format} does not support this model: {reason}")


def describe_exports(model: Architecture) -> str:
    """Which formats support an architecture, for the log."""
    reasons = {format: unsupported_reason(model, format) for format in get_args(Format)}
    return ", ".join(f"{name}: {f'no ({reason})' if reason else 'yes'}" for name, reason in reasons.items())


def import_optional(module: str) -> ModuleType:
    """Import a module of an optional dependency. Raises UsageError, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UsageError(f"{package} is not installed: pip install 'mtrain[interop]' ({error})") from None
