"""Codes and English names of languages, and languages in the names of files and columns."""

import locale
import re
from collections.abc import Sequence
from functools import lru_cache

# A language with a script, a region or a variant: zh_Hans, pt-BR, sr-Latn-RS, ca-valencia. Scripts may be in
# lower case if they are not words.
_SCRIPTS = "arab|beng|cyrl|deva|ethi|grek|guru|hans|hant|hebr|jpan|kore|latn|tfng|tibt"
_VARIANTS = "ekavsk|ijekavsk|tarask|valencia"
_TAG = re.compile(
    rf"([a-z]{{2,3}})(?:[-_]({_SCRIPTS}|(?-i:[A-Z][a-z]{{3}})))?(?:[-_]([a-z]{{2}}|419))?(?:[-_]({_VARIANTS}))?",
    re.IGNORECASE,
)
# Tags whose second part is a region, although it is also the code of a language. In other tags, such as
# `en-de`, the second part is a language.
_LIKE_LANGUAGES = frozenset(
    ("de-ch", "en-ca", "et-ee", "fr-ca", "fr-ch", "it-ch", "ko-kr", "pt-br", "sl-si", "sv-se", "zh-tw")
)
_PAIR = re.compile(r"(?<![A-Za-z])([A-Za-z]{2,3})[-_]([A-Za-z]{2,3})(?=\.|$)")
_WORD = re.compile(r"([A-Za-z]+|\d+)")
# Codes of rare languages that usually have another meaning in the names of files and columns. They count as
# codes only if the name of another file has a language in the same place: `train.tok` beside `train.en`.
_ABBREVIATIONS = """
    all aln bad bib big bin bio bpe col com con dev dic doc dup end gov hub ids key lab law len log low lst
    map max med mid min mix neg new nmt not num old one org par pos pre pro raw rel res row run sci seg seq
    set sim smt spm src std str sub sym sys tag ted ter tgt the tok top trg tst two txt uni url val ver wmt
    www
"""
_OTHER_MEANINGS = frozenset(_ABBREVIATIONS.split())
_NAMES = {  # which are shorter or more usual than the names in ISO 639
    **{"cu": "Church Slavonic", "el": "Greek", "fy": "Frisian", "ht": "Haitian Creole", "ia": "Interlingua"},
    **{"ky": "Kyrgyz", "ms": "Malay", "ne": "Nepali", "oc": "Occitan", "or": "Odia", "pa": "Punjabi"},
    **{"ps": "Pashto", "sh": "Serbo-Croatian", "sw": "Swahili", "to": "Tongan", "ug": "Uyghur"},
}
_MEMBERS = {  # individual languages for which the code of their macrolanguage is usually used
    **{"als": "sq", "arb": "ar", "ayr": "ay", "azj": "az", "cmn": "zh", "ekk": "et", "fuv": "ff"},
    **{"gaz": "om", "hbs": "sh", "khk": "mn", "kmr": "ku", "knc": "kr", "lvs": "lv", "npi": "ne"},
    **{"ory": "or", "pbt": "ps", "pes": "fa", "plt": "mg", "swh": "sw", "uzn": "uz"},
    **{"ydd": "yi", "zsm": "ms"},
}
_CODES = {name.lower(): code for code, name in _NAMES.items()} | _MEMBERS


def find_language(word: str) -> str | None:
    """The code of a language that is given by a code of any part of ISO 639 or by its English name, in any
    case: `de` for `de`, `deu`, `ger` and `German`, `csb` for `Kashubian`, `pt-BR` for `pt_BR`. The code has
    two letters if the language has such a code. None for any other word."""
    base, subtags = _split(word)
    code, _ = _code_and_name(base)
    return code and code + subtags


def common_language(word: str) -> str | None:
    """Like `find_language`, for the languages of ISO 639-1 without a script or region."""
    code, _ = _code_and_name(word)
    return code if code and len(code) == 2 else None


def language_name(code: str) -> str:
    """The English name of a language; the code itself if it is unknown. `pt-BR` is `Portuguese (BR)`."""
    base, subtags = _split(code)
    _, name = _code_and_name(base)
    return code if name is None else f"{name} ({subtags[1:]})" if subtags else name


@lru_cache(4096)  # a server is asked for any word
def _code_and_name(word: str) -> tuple[str, str] | tuple[None, None]:
    """The shortest code and the English name of a language by any code or name in ISO 639."""
    word = _CODES.get(word.lower(), word)
    if word.lower() in _NAMES:
        return word.lower(), _NAMES[word.lower()]
    from iso639 import Lang, is_language  # here: reading its tables takes a while

    form = word.title() if len(word) > 3 else word.lower()
    if not is_language(form) or (language := Lang(form)).scope() == "Special":  # such as `und`
        return None, None
    code = language.pt1 or language.pt3 or language.pt5
    return _code_and_name(code) if code in {*_NAMES, *_MEMBERS} else (code, language.name)


def _split(word: str) -> tuple[str, str]:
    """The language of a code, and its script, region and variant: `zh` and `-Hant-TW` for `zh_hant_tw`."""
    match = _TAG.fullmatch(word)
    if match is None:
        return word, ""
    language, script, region, variant = match.groups(default="")
    if region.islower() and not variant and not _is_region(language.lower(), region):
        return word, ""
    subtags = (script.title(), region.upper(), variant.lower())
    return language, "".join(f"-{subtag}" for subtag in subtags if subtag)


def _is_region(language: str, word: str) -> bool:
    """Whether a word of two letters after a language is its region, not another language."""
    return word == language or f"{language}-{word}" in _LIKE_LANGUAGES or common_language(word) is None


def words_of(name: str) -> list[str]:
    """The words and numbers in the name of a file or column: `train`, `de`, `en`, `de` in
    `train.de-en.de`. A region, script or variant stays with its language, as in `pt-BR`."""
    parts = _WORD.split(name)  # every other one is a word
    words, place = list[str](), 1
    while place < len(parts):
        ends = (place + size for size in (7, 5, 3) if _is_tag_in_name("".join(parts[place : place + size])))
        end = next(ends, place + 1)
        words.append("".join(parts[place:end]))
        place = end + 1
    return words


def _is_tag_in_name(word: str) -> bool:
    """Whether a part of a name is a language with a script, region or variant. A region in lower case must be
    a usual one, because `en-tc` may also be truecased English."""
    language, subtags = _split(word)
    if not subtags or language.lower() in _OTHER_MEANINGS or find_language(language) is None:
        return False
    region = re.search("-[A-Z]{2}(?=-|$)", subtags)
    is_written_so = language.islower() and (region is None or region[0][1:] in word)
    return region is None or is_written_so or f"{language}_{region[0][1:]}".lower() in locale.locale_alias


def certainty(word: str) -> int:
    """How certainly a word in a name stands for the language that `find_language` finds: 2 for ISO 639-1 and
    codes with a script or region, 1 for other codes, 0 for other names and for codes with other meanings."""
    if common_language(word) or _split(word)[1]:
        return 2
    return int(len(word) < 4 and word.lower() not in _OTHER_MEANINGS)


def languages_in(words: Sequence[str], least: int = 2) -> list[str]:
    """The codes of the words that stand for a language with a certainty of at least `least`, in order."""
    codes = (find_language(word) for word in words if certainty(word) >= least)
    return [code for code in codes if code is not None]


def languages_of_pair(name: str) -> list[str]:
    """The codes of the two languages in a name such as `train.en-csb.tsv`; empty if there is no such pair. In
    `en-to-de.tsv`, `to` is not the code of Tongan."""
    words = words_of(name)
    found = languages_in(words)
    if len(set(found)) > 2:
        found = languages_in([word for word in words if word.lower() != "to"])
    if len(set(found)) != 2 and (match := _PAIR.search(name)):
        found = languages_in(match.groups(), 1)
    codes = [*dict.fromkeys(found)]
    return codes if len(codes) == 2 else []
