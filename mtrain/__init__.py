"""mtrain: train translation models from parallel text."""

from typing import TYPE_CHECKING, Any

from mtrain.version import __version__

__all__ = ["Translation", "Translator", "__version__"]

if TYPE_CHECKING:
    from mtrain.decoding.translate import Translator
    from mtrain.decoding.translation import Translation
else:  # for type checkers, no other name exists

    def __getattr__(name: str) -> Any:
        """Load the Python interface when it is asked for. It imports PyTorch; `--help` does not need it."""
        if name in ("Translation", "Translator"):
            from mtrain.decoding import translate

            return getattr(translate, name)
        raise AttributeError(f"module 'mtrain' has no attribute '{name}'")
