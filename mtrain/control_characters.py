"""Text from files, names and models, as a terminal may show it."""

import unicodedata

_DIRECTION = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}  # change the direction of text


def escape_control_characters(text: str, kept: str = "\n") -> str:
    """Escape the characters of text that a terminal would interpret, except for those `kept`: control
    characters, line separators, what changes the direction of text, and bytes that are not text. Joiners,
    spaces and the marks of text that is written from right to left stay."""
    return "".join(repr(c)[1:-1] if _is_interpreted(c) and c not in kept else c for c in text)


def _is_interpreted(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _DIRECTION
