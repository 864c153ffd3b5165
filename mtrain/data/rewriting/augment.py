"""Changes to text that models should tolerate: letter case, missing punctuation, typing errors; and noise.

The modifiers of OpusTrainer (Bogoychev et al., "OpusCleaner and OpusTrainer", 2023) are the model. All random
numbers come from the given generator.
"""

import itertools
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import regex  # supports Unicode properties

from mtrain.config.languages import base_language, has_spaces, scripts_of_language
from mtrain.config.sections.augment import Augment

CHANGES = ("uppercase", "titlecase", "drop_final_punctuation", "typos")  # in the order in which they apply
_CASED = {"ADLAM", "ARMENIAN", "CHEROKEE", "CYRILLIC", "GEORGIAN", "GREEK", "LATIN"}  # of those in the table
_DOTTED = ("az", "crh", "gag", "tr")  # languages whose "i" keeps its dot as a capital
_WORD_START = re.compile(r"(?<!\S)((?:[^\w\s]|[ʰ-ˮ])*)(ij|\w)")  # "ʰ" to "ˮ" have no case, as in ʻOkina
_GREEK = regex.compile(r"[\p{Greek}\p{M}]+")
# Greek capitals have no accents, except the word "ή". An accent that divides a diphthong becomes a diaeresis.
_DIVIDED = regex.compile(r"(?<=[ΑΕΗΙΟΥΩ])\u0301([ΙΥ])(?!\u0308)")
_ACCENTS = regex.compile(r"^Η\u0301$(*SKIP)(*FAIL)|[\u0300\u0301\u0313\u0314\u0342]")
_FINAL = r"[\s\p{Terminal_Punctuation}‥…⋯՜՞༔]"  # punctuation of sentences and their parts, and spaces
_CODE_POINTS = 0x20000  # among which they are
_ENDS_IN_LETTER = regex.compile(r"(?r)\p{L}\p{M}*\Z")
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")  # of a keyboard
_ERRORS = ("omit", "double", "swap", "replace", "insert", "join", "split")
_WORDS_PER_ERROR = 10
_LETTERS_PER_WORD = 3  # about, in languages written without spaces
# Ranges of code points of several scripts, symbols and emoji.
_NOISE = (
    *((0xC0, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x531, 0x586), (0x5D0, 0x5EA), (0x620, 0x64A)),
    *((0x904, 0x939), (0xE01, 0xE30), (0x10D0, 0x10FA), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5)),
    *((0xAC00, 0xD7A3), (0x2190, 0x21FF), (0x2200, 0x22FF), (0x2600, 0x26FF), (0x2701, 0x27BF)),
    *((0x1F300, 0x1F5FF), (0x1F600, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F910, 0x1F9FF)),
)
_NOISE_WORDS, _NOISE_CHARACTERS = 6, 5  # at most, in a text and in a word
_PLACEHOLDERS = range(0xD800, 0xE000)  # surrogates: no text contains them, and they are no letters


def may_have_case(language: str) -> bool:
    """Whether a language has a script with capital letters, or its scripts are not known."""
    scripts = scripts_of_language(language)
    return not scripts or not _CASED.isdisjoint(scripts)


def has_case(text: str, language: str) -> bool:
    """Whether a text is in a script with capital letters: its language may have one, and most letters have a
    capital form. The letters count because a text may be in another language."""
    if not may_have_case(language):
        return False
    letters = [character for character in text if character.isalpha()]
    return 2 * sum(letter.upper() != letter.lower() for letter in letters) > len(letters)


def upper_cased(text: str, language: str) -> str:
    """The text in upper case, if its script has it, by the rules of Unicode's CLDR for the language."""
    if not has_case(text, language):
        return text
    match base_language(language):
        case code if code in _DOTTED:
            text = text.replace("i", "İ")
        case "hy":
            text = text.replace("և", "եվ")
        case "el" | "grc":
            text = _GREEK.sub(lambda word: _without_accents(word[0].upper()), text)
    return text.upper()


def _without_accents(word: str) -> str:
    """A Greek word in upper case without accents and breathings."""
    word = _DIVIDED.sub("\\1\u0308", unicodedata.normalize("NFD", word))
    return unicodedata.normalize("NFC", _ACCENTS.sub("", word))


def title_cased(text: str, language: str) -> str:
    """The text with a capital at the beginning of each word, if its script has capitals that begin words,
    which Georgian ones do not. Other letters are kept."""
    if not has_case(text, language):
        return text
    code = base_language(language)
    special = {"i": "İ"} if code in _DOTTED else {"nl": {"ij": "IJ"}, "hy": {"և": "Եվ"}}.get(code, {})

    def capitalized(match: re.Match[str]) -> str:
        start = match[2]
        first = special.get(start[0], start[0].title())
        return match[1] + special.get(start, first + start[1:])

    return _WORD_START.sub(capitalized, text)


def without_final_punctuation(text: str) -> str:
    """The text without the punctuation at its end. It is kept if nothing else would be left."""
    return text.rstrip(_final_characters()) or text


@cache
def _final_characters() -> str:
    return "".join(regex.findall(_FINAL, "".join(map(chr, range(_CODE_POINTS)))))


def with_typos(text: str, language: str, generator: random.Random) -> str:
    """The text with typing errors, about one per ten words and at least one. A text of fewer than two letters
    is not changed."""
    words = len(text.split())
    if not has_spaces(language):
        words = max(words, sum(map(str.isalpha, text)) // _LETTERS_PER_WORD)
    for _ in range(max(1, round(words / _WORDS_PER_ERROR))):
        text = _mistyped(text, generator)
    return text


def _mistyped(text: str, generator: random.Random) -> str:
    """The text with one typing error."""
    letters = [i for i, character in enumerate(text) if character.isalpha()]
    if len(letters) < 2:
        return text
    place, error = generator.choice(letters), generator.choice(_ERRORS)
    letter = _letter_at(text, place)
    before, after = text[:place], text[place + len(letter) :]
    if error == "join":
        # Not beside a symbol, which has a placeholder.
        found = re.finditer("(?<![\ud800-\udfff]) (?![\ud800-\udfff])", text)
        spaces = [match.start() for match in found]
        space = generator.choice(spaces) if spaces else None
        return before + after if space is None else text[:space] + text[space + 1 :]
    if error == "split" and _ENDS_IN_LETTER.search(before):
        return f"{before} {letter}{after}"
    if error == "swap" and after[:1].isalpha() and (following := _letter_at(after, 0)) != letter:
        return before + following + letter + after[len(following) :]
    if error in ("replace", "insert"):
        other = _neighbor(letter, generator) or _letter_at(text, generator.choice(letters))
        return before + other + (letter if error == "insert" else "") + after
    return before + (2 * letter if error == "double" else "") + after


def _letter_at(text: str, place: int) -> str:
    """The letter at a place, with its marks, such as vowel signs."""
    end = place + 1
    while end < len(text) and unicodedata.category(text[end])[0] == "M":
        end += 1
    return text[place:end]


def _neighbor(letter: str, generator: random.Random) -> str | None:
    """A letter next to `letter` on a keyboard; None if it is not on it."""
    for row, keys in enumerate(_ROWS):
        if (column := keys.find(letter.lower())) >= 0:
            near = [(row, column - 1), (row, column + 1), (row - 1, column), (row + 1, column)]
            found = [_ROWS[y][x] for y, x in near if 0 <= y < len(_ROWS) and 0 <= x < len(_ROWS[y])]
            other = generator.choice(found)
            return other.upper() if letter.isupper() else other
    return None


def noise(generator: random.Random) -> str:
    """Some words of random characters: each of letters of one script, or of symbols or emoji."""
    words = []
    for _ in range(generator.randint(1, _NOISE_WORDS)):
        first, last = generator.choice(_NOISE)
        drawn = (chr(generator.randint(first, last)) for _ in range(generator.randint(1, _NOISE_CHARACTERS)))
        words.append("".join(character for character in drawn if unicodedata.category(character)[0] in "LS"))
    return " ".join(filter(None, words))


class Side(NamedTuple):
    """One side of pairs: its language, and a pattern of what is never changed in it, such as `<2de>`."""

    language: str
    symbols: re.Pattern[str] | None = None

    def change(self, name: str, text: str, generator: random.Random) -> str:
        """The text with one of `CHANGES`."""
        hidden, found = self._hide_symbols(text)
        if len(found) > len(_PLACEHOLDERS):
            return text
        if name == "uppercase":
            hidden = upper_cased(hidden, self.language)
        elif name == "titlecase":
            hidden = title_cased(hidden, self.language)
        elif name == "typos":
            hidden = with_typos(hidden, self.language, generator)
        else:
            hidden = without_final_punctuation(hidden)
        return hidden.translate(dict(zip(_PLACEHOLDERS, found, strict=False)))

    def _hide_symbols(self, text: str) -> tuple[str, list[str]]:
        """The text with a placeholder for each symbol, and the symbols."""
        if self.symbols is None or not (found := self.symbols.findall(text)):
            return text, []
        placeholders = itertools.cycle(map(chr, _PLACEHOLDERS))
        return self.symbols.sub(lambda _: next(placeholders), text), found


def with_cases(texts: Iterable[str], side: Side, augment: Augment, seed: int) -> Iterator[str]:
    """The texts that a vocabulary is learned from, with the same proportions in upper and title case as in
    training. Both sides of a pair are changed alike."""
    generator = random.Random(f"cases {seed}")
    for text in texts:
        for name in ("titlecase", "uppercase"):
            if generator.random() < getattr(augment, name):
                text = side.change(name, text, generator)
        yield text


def change_pair(
    name: str, source: str, targets: Sequence[str], sides: tuple[Side, Side], generator: random.Random
) -> tuple[str, Sequence[str]]:
    """A source and its translations with one of `CHANGES`. Typing errors are made in the source only.

    Nothing is changed if the source would not change, because its script has no capitals, for example; nor if
    final punctuation is missing from the source or the first translation.
    """
    new = sides[0].change(name, source, generator)
    if name == "typos":
        return new, targets
    translations = [sides[1].change(name, target, generator) for target in targets]
    both = name != "drop_final_punctuation" or translations[0] != targets[0]
    return (new, translations) if new != source and both else (source, targets)
