"""The language of texts, by py3langid if it is installed."""

from collections.abc import Collection, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from mtrain.config.languages import base_language
from mtrain.errors import UsageError

EXTRA = "pip install 'mtrain[languages]'"  # installs py3langid
_TEXTS = 200  # which suffice
_LETTERS = 20  # of less text, the language is not identified
_PART, _AGREEING = 100, 0.9  # letters of a part, and share of the parts that must be in the language
_CHARACTERS = 10_000  # which suffice
_PROBABILITY = 0.5  # above which a single text is taken to be in a language
# Of languages that py3langid calls otherwise.
_LABELS = {"fil": "tl", "iw": "he", "ki": "kik", "nb": "no", "sh": "sr"}
_SIMILAR = 10  # languages that a text may be in: similar ones are hard to tell apart
_NO_LANGUAGE = "zxx"  # what py3langid calls a text without words
# Similar languages, of which parts of a text may seem to be, by one of them.
_GROUPS = ("zh yue wuu", "sh bs hr sr", "no nb nn da", "id ms", "ar arz ary apc ajp acm", "cs sk", "es gl pt")
_ALIKE = {code: group.split()[0] for group in _GROUPS for code in group.split()}
_CHINESE = dict.fromkeys(("yue", "wuu"), "zh")  # short sentences in Chinese may seem to be these


class Identified(NamedTuple):
    """The language that a text seems to be in, and the languages that it is not in."""

    code: str
    others: frozenset[str]
    is_uniform: bool = True  # whether most parts of the text seem to be in this language

    def is_in(self, language: str) -> bool:
        """Whether the text seems to be in a language."""
        return self.code == base_language(_label_of(language))

    def is_not(self, language: str) -> bool:
        """Whether the text is certainly not in a language."""
        return _label_of(language) in self.others


def _label_of(language: str) -> str:
    """What py3langid calls a language."""
    base = base_language(language)
    return _LABELS.get(base, base)


def can_identify() -> bool:
    """Whether languages can be identified."""
    return find_spec("py3langid") is not None


def identify_language(texts: Sequence[str], by_parts: bool = False) -> Identified | None:
    """The language that most of some texts are written in. None if there is too little text, or if py3langid
    is not installed. With `by_parts`, whether the text is uniform is found out as well."""
    text = "\n".join(texts[:: -(-len(texts) // _TEXTS) or 1])
    if not can_identify() or sum(map(str.isalpha, text)) < _LETTERS:
        return None
    codes = [code for code, _ in _identifier().rank(text)]  # the most probable first
    code = base_language(_CHINESE.get(codes[0], codes[0]))
    if code == _NO_LANGUAGE:
        return None
    found = Identified(code, frozenset(codes[_SIMILAR:]))
    if not by_parts:
        return found
    # A text in a language that py3langid does not know seems to be in several.
    labels = [_identifier().classify(part)[0] for part in _parts_of(text)]
    votes = sum(_ALIKE.get(label, label) == _ALIKE.get(codes[0], codes[0]) for label in labels)
    is_uniform = votes >= _AGREEING * len(labels) or votes >= len(labels) - 1 > 1
    return found._replace(is_uniform=is_uniform)


def _parts_of(text: str) -> list[str]:
    """Parts of at least `_PART` letters, of whole lines."""
    parts, letters = [""], 0
    for line in text.split("\n"):
        if letters >= _PART:
            parts.append("")
            letters = 0
        parts[-1] += f"{line}\n"
        letters += sum(map(str.isalpha, line))
    return parts[:-1] if len(parts) > 1 and letters < _PART else parts


@cache
def _identifier() -> Any:
    """The model of py3langid, with probabilities."""
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def detect_languages(text: str, among: Collection[str]) -> list[tuple[str, float]]:
    """The languages `among` which a text may be in, the most probable one first, with probabilities that sum
    to 1. Empty if py3langid knows none of them or, for several ones, is not installed."""
    if len(set(among)) == 1:
        return [(code, 1.0) for code in set(among)]
    if not can_identify():
        return []
    codes = {_LABELS.get(code, code): code for code in among}
    probabilities: dict[str, float] = {}
    for label, probability in _identifier().rank(text[:_CHARACTERS]):
        if code := codes.get(label) or codes.get(_CHINESE.get(label, "")):
            probabilities[code] = probabilities.get(code, 0.0) + float(probability)
    total = sum(probabilities.values()) or 1.0
    return sorted(((code, each / total) for code, each in probabilities.items()), key=lambda pair: -pair[1])


class LanguageFilter:
    """Finds texts that are not in an expected language."""

    def __init__(self, language: str):
        """Raises UsageError if py3langid is not installed, or does not know the language."""
        if not can_identify():
            raise UsageError(f"data.filters.language needs py3langid, which is not installed; run `{EXTRA}`")
        self._model = _identifier()
        self._label = _label_of(language)
        if self._label not in self._model.labels:
            known = ", ".join(sorted(self._model.labels))
            raise UsageError(f"data.filters.language: py3langid does not know {language}; it knows {known}")

    def is_other(self, text: str) -> bool:
        """Whether a text is in another language, with a probability above 0.5."""
        label, probability = self._model.classify(text)
        is_expected = self._label in (label, _CHINESE.get(label))
        return not is_expected and bool(probability > _PROBABILITY)
