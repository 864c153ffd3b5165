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
from mtrain.config.languages import base_language, find_code, name_different_scripts, names_in_tags
from mtrain.data.text.identify_language import EXTRA, detect_languages
from mtrain.decoding.translate import Translator
from mtrain.errors import ModelError, UsageError

_ALMOST_CERTAIN = 0.9  # probability of a language
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
    """Codes as clients use them, with the model's codes: `de` for `deu_Latn`, but `zh-Hans` for `zho_Hans`
    and `zh-TW` for `zh_TW` if another of these or of the `known` codes is of the same language."""
    own = list(codes)
    bases = Counter(map(base_language, own))
    full = {code: find_language(code) or code for code in {*own, *known}}
    variants = Counter(base_language(code) for code in {*full.values()} if re.search("[-_]", code))

    def short(code: str) -> str:
        base = base_language(code)
        return base if bases[base] == 1 and variants[base] < 2 else full[code]

    return {short(code) if any("_" in each for each in own) else code: code for code in own}


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
        source, target = (find_language(code) or code for code in (source, target))
        source = find_code(source, self.sources)
        target = find_code(target, self.targets_of(source))
        return self._models[source, target].between(source, target)

    def is_same(self, source: str, target: str) -> bool:
        """Whether two codes name the same language of a model."""
        source, target = (find_language(code) or code for code in (source, target))
        if name_different_scripts(source, target):
            return False
        with suppress(UsageError):  # one fits no code, or several
            return find_code(source, self.codes) == find_code(target, self.codes)
        return False

    def detect(self, text: str, target: str | None = None) -> list[dict[str, Any]]:
        """The languages that a text may be in, the most probable one first, with a confidence from 0 to 100:
        of all languages or, with a `target`, of those that can be translated into it, unless the text is
        almost certainly in `target` already. Raises UsageError if the language cannot be identified."""
        codes = _by_language(self.codes)
        found = detect_languages(text, codes)
        if target is not None:
            target = find_language(target) or target
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
        return [{"language": codes[code], "confidence": round(100 * each, 1)} for code, each in found[:5]]

    def languages(self) -> list[dict[str, Any]]:
        """The answer to `/languages`."""
        named = [(code, language_name(code), self.targets_of(code)) for code in self.codes]
        return [{"code": code, "name": name, "targets": targets} for code, name, targets in named]
