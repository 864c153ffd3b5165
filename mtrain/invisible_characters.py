"""Characters that cannot be seen: blank text, control characters and directions of text on a terminal."""

import unicodedata

ISOLATES = "\u2068\u2069"  # begin and end text that is not reordered together with the text around it
_DIRECTION = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}  # change the direction of text

_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp"}  # categories: control and format characters, spaces


def is_blank(text: str) -> bool:
    """Whether a text has nothing to translate: only spaces, control characters, and characters without width
    such as U+200B."""
    return all(unicodedata.category(character) in _INVISIBLE for character in text)


def code_point(character: str) -> str:
    """The number of a character as Unicode writes it, such as `U+00A0`."""
    return f"U+{ord(character):04X}"


def show_piece(piece: str) -> str:
    """A piece of SentencePiece as a label: code points, such as `U+00A0`, if it has no character that can be
    seen. `▁`, which stands for a space, can be seen."""
    import regex  # here: every command imports this file

    if not regex.fullmatch(r"▁*[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}]+", piece):
        return piece
    return " ".join(c if c == "▁" else code_point(c) for c in piece)


def escape_control_characters(text: str, kept: str = "\n") -> str:
    """Escape the characters that a terminal would interpret and that are not in `kept`: control characters,
    line separators, overrides of the text direction, and surrogates, which stand for invalid bytes. Joiners,
    spaces and right-to-left marks are not escaped."""
    return "".join(repr(c)[1:-1] if _is_interpreted(c) and c not in kept else c for c in text)


def isolate(text: str) -> str:
    """Escaped text between invisible marks (first strong isolate, UAX #9) if some of it is written from right
    to left, so that a terminal does not reorder it together with the text around it."""
    is_mixed = not text.isascii() and any(unicodedata.bidirectional(c) in ("R", "AL") for c in text)
    return text.join(ISOLATES) if is_mixed else text


def _is_interpreted(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _DIRECTION
