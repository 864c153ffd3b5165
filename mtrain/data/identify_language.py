"""The language of a text, by py3langid if it is installed."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

EXTRA = "pip install 'mtrain[languages]'"  # installs py3langid
_TEXTS = 200  # which suffice
_LETTERS = 20  # of less text, the language is not identified
_SIMILAR = 10  # languages that a text may be in: similar ones are hard to tell apart
_CHINESE = dict.fromkeys(("yue", "wuu"), "zh")  # short sentences in Chinese may seem to be these


class Identified(NamedTuple):
    """The language that a text seems to be in, and those that it is not in."""

    code: str
    others: frozenset[str]


def can_identify() -> bool:
    """Whether languages can be identified."""
    return find_spec("py3langid") is not None


def identify_language(texts: Sequence[str]) -> Identified | None:
    """The language that most of some texts are written in. None if there is too little text, or if py3langid
    is not installed."""
    text = "\n".join(texts[:: -(-len(texts) // _TEXTS) or 1])
    if not can_identify() or sum(map(str.isalpha, text)) < _LETTERS:
        return None
    import py3langid

    codes = [code for code, _ in py3langid.rank(text)]  # the most probable first
    return Identified(_CHINESE.get(codes[0], codes[0]), frozenset(codes[_SIMILAR:]))
