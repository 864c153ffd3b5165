"""Codes and English names of languages, and languages in the names of files and columns."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_SUBTAG = r"[A-Z]{2}|[A-Z][a-z]{3}|419"  # a region or a script: BR in pt-BR, Hans in zh_Hans
_WITH_SUBTAG = rf"(?<![A-Za-z])[a-z]{{2,3}}[-_](?:{_SUBTAG})(?![A-Za-z])"
_WORD = re.compile(r"[A-Za-z]+|\d+")


class Named(NamedTuple):
    """A word in a name that stands for a language."""

    place: int  # of the word in the name
    code: str


class _Names(NamedTuple):
    by_word: dict[str, str]  # lowercase codes of all standards, and English names: the code
    by_code: dict[str, str]  # the code: the English name


@cache
def _names() -> _Names:
    """The languages of ISO 639-1; `languages.tsv` also has their codes in ISO 639-2 and 639-3."""
    by_word: dict[str, str] = {}
    by_code: dict[str, str] = {}
    for line in (files("mtrain.config") / "languages.tsv").read_text(encoding="utf-8").splitlines():
        code, others, name = line.split("\t")
        by_code[code] = name
        by_word |= dict.fromkeys((code, *others.split(), name.lower()), code)
    return _Names(by_word, by_code)


def find_language(word: str) -> str | None:
    """The code of a language that is given by a code or by its English name, in any case: `de` for `de`,
    `deu`, `ger` and `German`, `pt-BR` for `pt_BR`. None for any other word."""
    base, separator, rest = word.partition("-" if "-" in word else "_")
    code = _names().by_word.get(base.lower())
    if code is None or not separator:
        return code
    return f"{code}-{rest}" if re.fullmatch(_SUBTAG, rest) else None


def language_name(code: str) -> str:
    """The English name of a language; the code itself if it is unknown. `pt-BR` is `Portuguese (BR)`."""
    base, _, rest = code.partition("-")
    name = _names().by_code.get(base)
    return code if name is None else f"{name} ({rest})" if rest else name


def words_of(name: str) -> list[str]:
    """The words and numbers in the name of a file or column: `train`, `de`, `en`, `de` in
    `train.de-en.de`. A region or script stays with its language, as in `pt-BR`."""
    words, end = [], 0
    for match in re.finditer(_WITH_SUBTAG, name):
        if find_language(match[0]):
            words += [*_WORD.findall(name[end : match.start()]), match[0]]
            end = match.end()
    return words + _WORD.findall(name[end:])


def languages_in(words: Sequence[str]) -> list[Named]:
    """The words that stand for a language, in order."""
    found = ((index, find_language(word)) for index, word in enumerate(words))
    return [Named(index, code) for index, code in found if code is not None]
