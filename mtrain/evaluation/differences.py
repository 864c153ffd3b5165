"""Which words of a sentence another sentence does not have."""

from difflib import SequenceMatcher
from itertools import groupby
from typing import NamedTuple

import regex  # whose \w includes vowel signs and joiners, unlike the \w of `re`

from mtrain.data.text.writing_systems import CHARACTER, UNSPACED

# White space, a word, or a character. A word does not begin with a mark: one may follow an emoji.
_TOKEN = regex.compile(rf"\s+|(?![\p{{M}}\p{{Cf}}])[^\W{UNSPACED}]+|{CHARACTER}", regex.S)


class Span(NamedTuple):
    """Consecutive words of a sentence, all of them changed or none."""

    text: str
    changed: bool  # whether the other sentence lacks these words, or has them in another place


def mark_differences(sentence: str, other: str) -> list[Span]:
    """Divide a sentence into words that `other` shares, in the same order, and words that it does not.

    The texts of the spans are together the sentence. White space counts as changed only between two changed
    words, so that a replaced phrase is one span. Case and punctuation matter.
    """
    tokens = _TOKEN.findall(sentence)
    indices = [index for index, token in enumerate(tokens) if not token.isspace()]
    matcher = SequenceMatcher(None, [tokens[index] for index in indices], words(other), autojunk=False)
    changed = [not token.isspace() for token in tokens]
    for start, _, size in matcher.get_matching_blocks():
        for index in indices[start : start + size]:
            changed[index] = False
    for index in range(1, len(tokens) - 1):
        if tokens[index].isspace():
            changed[index] = changed[index - 1] and changed[index + 1]
    groups = groupby(zip(tokens, changed, strict=True), key=lambda pair: pair[1])
    return [Span("".join(token for token, _ in group), is_changed) for is_changed, group in groups]


def words(sentence: str) -> list[str]:
    """The words and punctuation marks of a sentence; single characters in scripts without spaces."""
    return [token for token in _TOKEN.findall(sentence) if not token.isspace()]
