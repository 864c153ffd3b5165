"""The scripts that texts are written in, such as LATIN or CYRILLIC."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

_FIRST_WORD = re.compile("[A-Z]+")
_GROUPS = dict.fromkeys(("HIRAGANA", "KATAKANA"), "CJK")  # Japanese mixes all three
_UNKNOWN = 2  # not a weight of `ScriptFilter`
_CODE_POINTS = 0x110000


@cache
def _script_of(character: str) -> str:
    """The script of a letter, from its Unicode name; empty for other characters."""
    if not character.isalpha():
        return ""
    name = _FIRST_WORD.match(unicodedata.name(character, ""))
    return _GROUPS.get(name[0], name[0]) if name else ""


def script_of(text: str) -> str:
    """The script of most letters of a text; empty if it has no letters."""
    letters = Counter(map(_script_of, text))
    del letters[""]
    return max(letters, key=letters.__getitem__, default="")


def main_script(texts: Iterable[str]) -> str:
    """The script of most texts."""
    scripts = Counter(map(script_of, texts))
    del scripts[""]
    return max(scripts, key=scripts.__getitem__, default="")


class ScriptFilter:
    """Finds the texts that are not written in the expected script."""

    def __init__(self, script: str):
        self._script = script
        # By code point: 1 for letters of the script, -1 for other letters, 0 for other characters.
        self._weights = np.full(_CODE_POINTS, _UNKNOWN, np.int8)

    def unexpected(self, texts: Sequence[str]) -> list[int]:
        """The indices of the texts most of whose letters have another script."""
        if not texts or (self._script == "LATIN" and all(map(str.isascii, texts))):  # fast path
            return []
        joined = "\0".join([*texts, ""])
        codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
        weights = self._weights[codes]
        if (unknown := weights == _UNKNOWN).any():
            for code in np.unique(codes[unknown]).tolist():
                script = _script_of(chr(code))
                self._weights[code] = 0 if not script else 1 if script == self._script else -1
            weights = self._weights[codes]
        starts = np.append(0, np.flatnonzero(codes == 0)[:-1] + 1)
        # If most letters have the expected script, it is the most frequent one.
        sums = np.add.reduceat(weights, starts, dtype=np.int32)
        doubtful: npt.NDArray[np.int64] = np.flatnonzero(sums <= 0)
        return [i for i in doubtful.tolist() if script_of(texts[i]) not in (self._script, "")]
