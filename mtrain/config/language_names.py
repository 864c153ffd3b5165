"""Codes and English names of languages, and languages in the names of files and columns."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# A script, a region or both: Hans in zh_Hans, BR in pt-BR, Latn_RS in sr_Latn_RS.
_SUBTAGS = r"[A-Z][a-z]{3}(?:[-_](?:[A-Z]{2}|419))?|[A-Z]{2}|419"
_WITH_SUBTAGS = rf"(?<![A-Za-z])[a-z]{{2,3}}[-_](?:{_SUBTAGS})(?![A-Za-z])"
_PAIR = re.compile(r"(?<![A-Za-z])([A-Za-z]{2,3})[-_]([A-Za-z]{2,3})(?=\.|$)")
_WORD = re.compile(r"[A-Za-z]+|\d+")
# Codes of rare languages that usually have another meaning in the names of files and columns. They count as
# codes only if the name of another file has a language in the same place: `train.tok` beside `train.en`.
_ABBREVIATIONS = """
    all aln bad bib big bin bio bpe col com con dev dic doc dup end gov hub key lab law len log low lst map
    max med mid min mix neg new nmt not num old one org par pos pre pro raw rel res row run sci seg seq set
    sim smt spm src std str sub sym sys tag ted ter tgt the tok top trg tst two txt uni url val ver wmt www
"""
_OTHER_MEANINGS = frozenset(_ABBREVIATIONS.split())


class Named(NamedTuple):
    """A word in a name that stands for a language."""

    place: int  # of the word in the name
    code: str


@cache
def _common() -> dict[str, tuple[str, str]]:
    """The code and name of the languages of ISO 639-1 by each of their codes in all parts of ISO 639, and by
    their names. These names are shorter than the names in the standard, such as `Modern Greek (1453-)`."""
    text = (files("mtrain.config") / "languages.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines())
    return {
        word: (code, name) for code, others, name in rows for word in (code, *others.split(), name.lower())
    }


def find_language(word: str) -> str | None:
    """The code of a language that is given by a code of any part of ISO 639 or by its English name, in any
    case: `de` for `de`, `deu`, `ger` and `German`, `csb` for `Kashubian`, `pt-BR` for `pt_BR`. The code has
    two letters if the language has such a code. None for any other word."""
    base, subtags = _split(word)
    code, _ = _code_and_name(base)
    return code and code + subtags


def common_language(word: str) -> str | None:
    """Like `find_language`, for the languages of ISO 639-1 without a script or region."""
    return _common().get(word.lower(), (None, None))[0]


def language_name(code: str) -> str:
    """The English name of a language; the code itself if it is unknown. `pt-BR` is `Portuguese (BR)`."""
    base, subtags = _split(code)
    _, name = _code_and_name(base)
    return code if name is None else f"{name} ({subtags[1:]})" if subtags else name


@cache
def _code_and_name(word: str) -> tuple[str, str] | tuple[None, None]:
    """The shortest code and the English name of a language by any code or name in ISO 639."""
    if found := _common().get(word.lower()):
        return found
    from iso639 import Lang, is_language  # here: reading its tables takes a while

    form = word.title() if len(word) > 3 else word.lower()
    if not is_language(form) or (language := Lang(form)).scope() == "Special":  # such as `und`
        return None, None
    code = language.pt1 or language.pt3 or language.pt5
    return _common().get(code, (code, language.name))


def _split(word: str) -> tuple[str, str]:
    """The language of a code, and its script and region: `zh` and `-Hant-TW` for `zh_Hant_TW`."""
    match = re.fullmatch(rf"([A-Za-z]{{2,3}})[-_]({_SUBTAGS})", word)
    return (match[1], f"-{match[2].replace('_', '-')}") if match else (word, "")


def words_of(name: str) -> list[str]:
    """The words and numbers in the name of a file or column: `train`, `de`, `en`, `de` in
    `train.de-en.de`. A region or script stays with its language, as in `pt-BR`."""
    words, end = [], 0
    for match in re.finditer(_WITH_SUBTAGS, name):
        if find_language(match[0]) and _split(match[0])[0] not in _OTHER_MEANINGS:
            words += [*_WORD.findall(name[end : match.start()]), match[0]]
            end = match.end()
    return words + _WORD.findall(name[end:])


def certainty(word: str) -> int:
    """How certainly a word in a name stands for the language that `find_language` finds: 2 for ISO 639-1 and
    codes with a script or region, 1 for other codes, 0 for other names and for codes with other meanings."""
    if common_language(word) or _split(word)[1]:
        return 2
    return int(len(word) < 4 and word.lower() not in _OTHER_MEANINGS)


def languages_in(words: Sequence[str], least: int = 2) -> list[Named]:
    """The words that stand for a language with a certainty of at least `least`, in order."""
    found = ((index, find_language(word)) for index, word in enumerate(words) if certainty(word) >= least)
    return [Named(index, code) for index, code in found if code is not None]


def languages_of_pair(name: str) -> list[str]:
    """The codes of the two languages in a name such as `train.en-csb.tsv`; empty if there is no such pair."""
    found = languages_in(words_of(name))
    if len({language.code for language in found}) != 2 and (match := _PAIR.search(name)):
        found = languages_in(match.groups(), 1)
    codes = [*dict.fromkeys(language.code for language in found)]
    return codes if len(codes) == 2 else []
