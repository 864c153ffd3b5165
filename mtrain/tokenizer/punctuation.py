"""Moses' normalization of punctuation (`normalize-punctuation.perl` for English, with the corrections of
sacremoses), which was applied to the training texts of NLLB-200."""

import re
from functools import cache
from importlib.resources import files


@cache
def _rules() -> list[tuple[re.Pattern[str], str]]:
    """Patterns and their replacements, in the order in which they are applied."""
    text = (files("mtrain.tokenizer") / "punctuation.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines())
    return [(re.compile(pattern), replacement) for pattern, replacement in rows]


def normalize_punctuation(text: str) -> str:
    """A text with ASCII quotation marks, hyphens and ellipses, and usual spaces around punctuation."""
    for pattern, replacement in _rules():
        text = pattern.sub(replacement, text)
    return text.strip()


def normalized_offsets(text: str) -> tuple[str, list[int]]:
    """The normalized text, and the offset in `text` of each of its characters and of its end."""
    offsets = list(range(len(text) + 1))
    for pattern, replacement in _rules():
        for match in reversed([*pattern.finditer(text)]):
            new, (start, end) = match.expand(replacement), match.span()
            text = text[:start] + new + text[end:]
            offsets[start:end] = [offsets[min(start + i, end - 1)] for i in range(len(new))]
    begin = len(text) - len(text.lstrip())
    stripped = text.strip()
    return stripped, offsets[begin : begin + len(stripped) + 1]
