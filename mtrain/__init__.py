"""mtrain: train translation models from parallel text."""

from typing import TYPE_CHECKING, Any

from mtrain.version import __version__

__all__ = ["Translation", "Translator", "__version__"]

if TYPE_CHECKING:
    from mtrain.decoding.translate import Translator
    from mtrain.decoding.translation import Translation


def __getattr__(name: str) -> Any:
    """Load the Python interface when it is asked for: it brings PyTorch, which `--help` can do without."""
    if name in ("Translation", "Translator"):
        from mtrain.decoding import translate

        return getattr(translate, name)
    raise AttributeError(f"module 'mtrain' has no attribute '{name}'")
