"""Which architectures the formats of `mtrain export` can hold."""

import importlib
import logging
from types import ModuleType
from typing import get_args

from mtrain.errors import UsageError
from mtrain.schema import Architecture, Config, Format

log = logging.getLogger(__name__)

FORMATS: tuple[Format, ...] = get_args(Format)


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
    """Say which exports the model will allow. Raises UsageError if not all that `export.require` names."""
    obstacles = {format: obstacle(config.model, format) for format in FORMATS}
    for format in config.export.require:
        if obstacles[format]:
            raise UsageError(f"export.require: no {format} export of this model: {obstacles[format]}")
    log.info(
        "exports: %s",
        ", ".join(f"{format}: {f'no ({no})' if no else 'yes'}" for format, no in obstacles.items()),
    )


def needed(module: str) -> ModuleType:
    """A module of a package that not everybody has. Raises UsageError saying how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UsageError(f"{package} is needed for this: pip install 'mtrain[interop]' ({error})") from None
