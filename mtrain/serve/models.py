"""The models of a server, and the directions that they translate in."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

from mtrain.config.language_names import find_language, language_name
from mtrain.config.languages import (
    ARGOS_CODES,
    base_language,
    find_code,
    name_different_scripts,
    names_in_tags,
)
from mtrain.data.text.identify_language import EXTRA, detect_languages
from mtrain.decoding.translate import Translator
from mtrain.errors import ModelError, UsageError

_ALMOST_CERTAIN, _LEAST_LIKELY = 0.9, 0.1  # probabilities of languages
# What clients mean by a code, if no code of the models fits it, or several do: the usual script of Chinese
# in a region, and the usual code for Norwegian.
_INSTEAD = {
    **dict.fromkeys(("zh", "zh-CN", "zh-SG", "zh-Hans"), ("zh-Hans", "zh-CN")),
    **dict.fromkeys(("zh-TW", "zh-HK", "zh-MO", "zh-Hant"), ("zh-Hant", "zh-TW")),
    **{"pt": ("pt-PT",), "nb": ("no",), "no": ("nb",)},
}
# Scripts that the code of a language alone stands for; the script of Chinese is always named.
_USUAL_SCRIPTS = {"az": "Latn", "bs": "Latn", "kk": "Cyrl", "pa": "Guru", "sr": "Cyrl", "uz": "Latn"}
_MOST_TRANSLATORS = 1024  # directions of a multilingual model that are kept ready


@dataclass(eq=False)
class ServedModel:
    """A model, and the codes by which clients name the languages that it translates from and into."""

    name: str
    translator: Translator
    sources: dict[str, str]  # clients' codes to the model's
    targets: dict[str, str]

    @classmethod
    def of(cls, path: Path, translator: Translator, known: Collection[str] = ()) -> "ServedModel":
        """A loaded model, whose name is the name of its folder. `known` are the codes of all models of
        the server. Raises ModelError if its languages are unknown."""
        sources, targets = _languages_of(translator)
        if "und" in (*sources, *targets):
            cure = "train it with codes such as de, or import it again with --set source_lang=..."
            raise ModelError(f"{path}: the languages of the model are unknown; {cure}")
        folder = Path(os.path.normpath(path.absolute()))  # a link has a name of its own
        name = folder.parent.name if folder.name == "model" else folder.name
        return cls(name, translator, _short_codes(sources, known), _short_codes(targets, known))

    @lru_cache(_MOST_TRANSLATORS)  # noqa: B019  (models live as long as the server)
    def between(self, source: str, target: str) -> Translator:
        """The translator for a direction, by clients' codes."""
        return self.translator.between(self.sources[source], self.targets[target])


def served_models(loaded: Sequence[tuple[Path, Translator]]) -> list[ServedModel]:
    """The models of a server, whose codes are chosen together. Raises ModelError if languages are unknown."""
    codes = {code for _, translator in loaded for side in _languages_of(translator) for code in side}
    return [ServedModel.of(path, translator, codes) for path, translator in loaded]


def _languages_of(translator: Translator) -> tuple[Sequence[str], Sequence[str]]:
    """The languages that a model translates from and into, by its own codes. A tag `<2de>` names only the
    target. A model whose source language has such a tag translates from all tagged languages."""
    own, tags = translator.own_direction, translator.language_tags
    vocabulary = translator.tokenizer.source
    if tags == "none":
        return [own.source], [own.target]
    if tags.startswith("codes"):
        return [*vocabulary.codes], [*vocabulary.codes]
    names, targets = names_in_tags(vocabulary.symbol_names)
    if tags == "both":  # other symbols have no meaning as languages
        known = {own.source, *targets}
        return [name for name in names if name in known or find_language(name)], targets
    return (targets if own.source in targets else [own.source]), targets


def _short_codes(codes: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Codes as clients use them, with the model's codes: `de` for `deu_Latn`, but `sr-Latn` for `srp_Latn`,
    whose script is not the usual one, and `zh-TW` for `zh_TW` if another of these or of the `known` codes is
    of the same language."""
    own = list(codes)
    bases = Counter(map(base_language, own))
    full = {code: find_language(code) or code for code in {*own, *known}}
    variants = Counter(base_language(code) for code in {*full.values()} if re.search("[-_]", code))

    def short(code: str) -> str:
        base = base_language(code)
        script = re.search("-([A-Z][a-z]{3})$", full[code])
        if script and (base == "zh" or _USUAL_SCRIPTS.get(base, script[1]) != script[1]):
            return full[code]
        if "_" not in code and (find_language(code) is None or ("-" in code and base in full)):
            return full[code]  # the user's own name, or a region that differs from a model without one
        return base if bases[base] == 1 and variants[base] < 2 else full[code]

    return {short(code): code for code in own}


def _standard(code: str) -> str:
    """The usual code for a language, by the code or the name that a client uses."""
    own = ARGOS_CODES.get(code.lower())
    return own[0] if own else find_language(code) or code


def _find_code(code: str, known: Collection[str]) -> str:
    """As `find_code`, also for names of languages, and for codes that clients use although a model has
    another one. Raises UsageError if no code or several codes fit."""
    if code in known:
        return code
    code = _standard(code)
    try:
        return find_code(code, known)
    except UsageError:
        for other in _INSTEAD.get("-".join(code.split("-")[:2]), ()):
            if other in known:
                return other
        raise


def _by_language(codes: Sequence[str]) -> dict[str, str]:
    """The first of some codes for each language, by the language."""
    return {base_language(code): code for code in reversed(codes)}


class Models:
    """All models of a server; of several models for a direction, the first one translates."""

    def __init__(self, served: Sequence[ServedModel]):
        """Raises UsageError if two models have the same name, or if there is no direction."""
        self.served = served
        self.names = ", ".join(model.name for model in served)
        if len({model.name for model in served}) < len(served):
            raise UsageError(f"MODEL: folders have the same name ({self.names}); rename or link one of them")
        self.sources = [*dict.fromkeys(chain.from_iterable(model.sources for model in served))]
        self.codes = [*dict.fromkeys(chain(self.sources, *(model.targets for model in served)))]
        self.directions = {  # each of each model, as clients of OpenAI's API name it
            f"{model.name}:{source}-{target}": (model, source, target)
            for model in served
            for source, target in product(model.sources, model.targets)
            if source != target
        }
        if not self.directions:
            raise UsageError(f"MODEL: {self.names}: no model translates into another language")
        # Reversed, because a dict keeps the last value for a key, and the first model for a direction counts.
        self._models = {(s, t): model for model, s, t in reversed(self.directions.values())}

    def targets_of(self, source: str) -> list[str]:
        """The languages that a language can be translated into."""
        return [code for code in self.codes if (source, code) in self._models]

    def find(self, source: str, target: str) -> Translator:
        """The translator between two languages. Raises UsageError if no model has this direction."""
        source = _find_code(source, self.sources)
        target = _find_code(target, self.targets_of(source))
        return self._models[source, target].between(source, target)

    def is_same(self, source: str, target: str) -> bool:
        """Whether two codes name the same language of a model."""
        if name_different_scripts(_standard(source), _standard(target)):
            return False
        with suppress(UsageError):  # one fits no code, or several
            return _find_code(source, self.codes) == _find_code(target, self.codes)
        return False

    def detect(self, text: str, target: str | None = None) -> list[dict[str, Any]]:
        """The languages that a text may be in, the most probable one first, with a confidence from 0 to 100:
        of all languages or, with a `target`, of those that can be translated into it, unless the text is
        almost certainly in `target` already. Raises UsageError if the language cannot be identified."""
        codes = _by_language(self.codes)
        found = detect_languages(text, codes)
        if target is not None:
            with suppress(UsageError):
                target = _find_code(target, self.codes)
            base = base_language(target)
            into = [code for code in self.codes if base_language(code) == base]
            known = [s for s in self.sources if any((s, t) in self._models for t in into)]
            if not known:
                raise UsageError(f"no model translates into {target}")
            sources = _by_language(known)
            if base in sources or dict(found).get(base, 0.0) < _ALMOST_CERTAIN:
                found, codes = detect_languages(text, sources), sources
            elif target in into:
                codes[base] = target
        if not found:
            raise UsageError(f"the language cannot be identified; name it, or install py3langid: {EXTRA}")
        likely = found[:1] + [each for each in found[1:5] if each[1] >= _LEAST_LIKELY]
        # Clients read whole numbers.
        return [{"language": codes[code], "confidence": float(round(100 * each))} for code, each in likely]

    def languages(self) -> list[dict[str, Any]]:
        """The answer to `/languages`."""
        named = [(code, language_name(code), self.targets_of(code)) for code in self.codes]
        return [{"code": code, "name": name, "targets": targets} for code, name, targets in named]
