"""Characters that cannot be seen: text that has no others, and control characters on a terminal."""

import unicodedata

_DIRECTION = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}  # change the direction of text

_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp"}  # categories: control and format characters, spaces


def is_blank(text: str) -> bool:
    """Whether a text has nothing to translate: only spaces, control characters, and characters without width
    such as U+200B."""
    return all(unicodedata.category(character) in _INVISIBLE for character in text)


def escape_control_characters(text: str, kept: str = "\n") -> str:
    """Escape the characters that a terminal would interpret and that are not in `kept`: control characters,
    line separators, overrides of the text direction, and surrogates, which stand for invalid bytes. Joiners,
    spaces and right-to-left marks are not escaped."""
    return "".join(repr(c)[1:-1] if _is_interpreted(c) and c not in kept else c for c in text)


def _is_interpreted(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _DIRECTION
