"""The scripts that texts are written in, such as LATIN or CYRILLIC."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from mtrain.tokenizer.code_points import code_points

_FIRST_WORD = re.compile("[A-Z]+")
# Chinese and Japanese mix these. "々" is an ideographic iteration mark.
_GROUPS = dict.fromkeys(("HIRAGANA", "KATAKANA", "HENTAIGANA", "BOPOMOFO", "IDEOGRAPHIC"), "CJK")
_GROUPS["MODIFIER"] = ""  # letters of several scripts, such as the ʻokina
_UNKNOWN = 2  # not a weight of `ScriptFilter`
_CODE_POINTS = 0x110000
# Patterns for `regex`. Letters that are written without spaces between words, with signs between kana that
# Unicode assigns to no script; and what is seen as one character: Burmese and Khmer write some letters below
# others, after a sign that ends a grapheme cluster.
_UNSPACED_SCRIPTS = ("Han", "Hiragana", "Katakana", "Khmer", "Lao", "Myanmar", "Thai", "Tibetan")
UNSPACED = "".join(rf"\p{{Script={name}}}" for name in _UNSPACED_SCRIPTS) + "\u30fc\uff70\uff9e\uff9f"
CHARACTER = r"(?:\X(?<=[\u1039\u17d2]))*\X"
_LATIN_END = 0x250  # the code point after the last Latin letter of several blocks in a row


@cache
def _script_of(character: str) -> str:
    """The script of a letter, from its Unicode name; empty for other characters. Full-width, half-width and
    mathematical letters have the script of the ordinary ones."""
    ordinary = unicodedata.normalize("NFKC", character) if character.isalpha() else ""
    names = (_FIRST_WORD.match(unicodedata.name(each, "")) for each in filter(str.isalpha, ordinary))
    scripts = (_GROUPS.get(name[0], name[0]) for name in names if name)
    return next(filter(None, scripts), "")


def script_of(text: str) -> str:
    """The script of most letters of a text; empty if it has no letters."""
    return _most_frequent(map(_script_of, text))


def main_script(texts: Iterable[str]) -> str:
    """The script of most texts."""
    return _most_frequent(map(script_of, texts))


def _most_frequent(scripts: Iterable[str]) -> str:
    counts = Counter(scripts)
    del counts[""]
    return max(counts, key=counts.__getitem__, default="")


class ScriptFilter:
    """Finds the texts that are not written in an expected script."""

    def __init__(self, *scripts: str):
        self._scripts = scripts
        # By code point: 1 for letters of these scripts, -1 for other letters, 0 for other characters.
        self._weights = np.full(_CODE_POINTS, _UNKNOWN, np.int8)

    def unexpected(self, texts: Sequence[str]) -> list[int]:
        """The indices of the texts most of whose letters have another script."""
        rows = _not_surely_latin(texts) if "LATIN" in self._scripts else range(len(texts))  # fast path
        texts = [texts[i] for i in rows]
        # If most letters have an expected script, no other one is the script of most letters.
        doubtful = np.flatnonzero(self._sum_weights(texts) <= 0).tolist()
        return [rows[i] for i in doubtful if script_of(texts[i]) not in (*self._scripts, "")]

    def _sum_weights(self, texts: Sequence[str]) -> npt.NDArray[np.int32]:
        """The sum of the weights of each text."""
        if not texts:
            return np.empty(0, np.int32)
        codes = code_points("\0".join([*texts, ""]))
        weights = self._weights[codes]
        if (unknown := weights == _UNKNOWN).any():
            for code in np.unique(codes[unknown]).tolist():
                script = _script_of(chr(code))
                self._weights[code] = 0 if not script else 1 if script in self._scripts else -1
            weights = self._weights[codes]
        starts = np.append(0, np.flatnonzero(codes == 0)[:-1] + 1)
        sums: npt.NDArray[np.int32] = np.add.reduceat(weights, starts, dtype=np.int32)
        return sums


def _not_surely_latin(texts: Sequence[str]) -> list[int]:
    """The indices of the texts with a character after Latin Extended-B, or with "µ" (Greek). All other
    letters before `_LATIN_END` are Latin ones."""
    # UTF-16 stores a character of more than 16 bits as two codes, which are both above `_LATIN_END`.
    codes = np.frombuffer("\0".join([*texts, ""]).encode("utf-16-le"), np.uint16)
    found = np.flatnonzero((codes >= _LATIN_END) | (codes == ord("µ")))
    rows: list[int] = np.unique(np.searchsorted(np.flatnonzero(codes == 0), found)).tolist()
    return rows
