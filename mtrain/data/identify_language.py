"""The language of a text, by py3langid if it is installed."""

from collections.abc import Sequence
from importlib.util import find_spec

EXTRA = "pip install 'mtrain[languages]'"  # installs py3langid
_TEXTS = 200  # which suffice
_LETTERS = 20  # of less text, the language is not identified


def can_identify() -> bool:
    """Whether languages can be identified."""
    return find_spec("py3langid") is not None


def identify_language(texts: Sequence[str]) -> str | None:
    """The code of the language that most of some texts are written in. None if there is too little text, or
    if py3langid is not installed."""
    text = "\n".join(texts[:: -(-len(texts) // _TEXTS) or 1])
    if not can_identify() or sum(map(str.isalpha, text)) < _LETTERS:
        return None
    import py3langid

    code: str = py3langid.classify(text)[0]
    return code
