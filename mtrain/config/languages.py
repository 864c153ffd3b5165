"""Language codes, and what depends on the language."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mtrain.config.language_names import common_language, find_language
from mtrain.errors import UsageError

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

# How the languages of a sentence are given to a model: by tags before the source (see `Direction.tag`), or by
# the codes of an imported model (see `Tokenizer.tags_of`). With `codes`, each side begins with the code of
# its language; with `codes_last`, the code of the source follows EOS, as in the first versions of NLLB-200.
LanguageTags = Literal["none", "target", "both", "codes", "codes_last"]

# For languages written without spaces, 13a would count whole sentences as words. Others of these: `char`.
_BLEU_TOKENIZERS = {**dict.fromkeys(("zh", "lzh", "wuu", "yue"), "zh"), "ja": "ja-mecab", "ko": "ko-mecab"}
_WITHOUT_SPACES = {"CJK", "KHMER", "LAO", "MYANMAR", "THAI", "TIBETAN"}
_RIGHT_TO_LEFT = {"ADLAM", "ARABIC", "HEBREW", "NKO", "THAANA"}
_ALWAYS = ("zh", "ja", "ko")  # languages whose BLEU has always had a tokenizer of its own
# Codes that only Argos Translate and LibreTranslate have, and those of others, the usual one first.
ARGOS_CODES = {"zt": ("zh-Hant", "zh-TW", "zh-HK", "zh-MO"), "pb": ("pt-BR",)}
_TAG = re.compile(r"(?:<[^<>]+> )?<2([^<>]+)> ?")  # at the beginning of a source; see `Direction.tag`


class Direction(NamedTuple):
    """What is translated into what, as language codes."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"

    def agrees_with(self, other: "Direction") -> bool:
        """Whether the languages are the same, as far as they are known: a code may be `und`."""
        pairs = zip(self, other, strict=True)
        return all("und" in (own, code) or is_same_language(own, code) for own, code in pairs)

    def tag(self, tags: LanguageTags) -> str:
        """What tells a multilingual model the languages of a source sentence, at its beginning: `<2de>` for
        the target (Johnson et al. 2017, section 3) and, before it, `<en>` for the source if `tags` is
        `both`; otherwise nothing."""
        found = {"target": f"<2{self.target}>", "both": f"<{self.source}> <2{self.target}>"}
        return found.get(tags, "")


def split_tag(source: str) -> tuple[str | None, str]:
    """The target language that the tag of a source names, and the source without the tag. Without a tag, the
    language is None."""
    tag = _TAG.match(source)
    return (tag[1], source[tag.end() :]) if tag else (None, source)


def names_in_tags(symbols: Iterable[str]) -> tuple[list[str], list[str]]:
    """What symbols have between angle brackets, such as `de` and `2de`, and the languages of those that name
    a target, such as `de` for `<2de>`; both sorted."""
    names = sorted(symbol[1:-1] for symbol in symbols if re.fullmatch("<.+>", symbol))
    return names, [name[1:] for name in names if name.startswith("2")]


@lru_cache(4096)
def base_language(code: str) -> str:
    """The language of a code without its region or script, with two letters if ISO 639-1 has it: `zh` for
    `zh`, `zh-TW`, `zh_CN` and `zho_Hans`."""
    language = code.lower().replace("_", "-").partition("-")[0]
    return language if len(language) == 2 else common_language(language) or language


def argos_code(code: str) -> str:
    """The code of a language in Argos Translate and LibreTranslate, without most scripts and regions."""
    standard = find_language(code) or code
    own = (own for own, codes in ARGOS_CODES.items() if "-".join(standard.split("-")[:2]) in codes)
    return next(own, base_language(code))


def is_same_language(one: str | None, other: str | None) -> bool:
    """Whether two codes are of one language, as `pt` and `pt-BR` are. None stands for an unknown language."""
    return one is not None and other is not None and base_language(one) == base_language(other)


def find_code(code: str, known: Collection[str]) -> str:
    """The code of a model, among the `known` ones, for a language code: `deu_Latn` for `deu_Latn`, `deu` and
    `de`, `zho_Hant` for `zh-Hant`, `pt` for `pt-BR`. Raises UsageError if no code or several codes fit."""
    if code in known:
        return code
    fitting = [one for one in known if is_same_language(one, code) and not name_different_scripts(one, code)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(f"language {code}: several codes of the model fit: {', '.join(fitting)}; give one")
    parts = {one.partition("_")[0]: one for one in known} | {one: one for one in known}
    near = [parts[part] for part in get_close_matches(code, parts, 1, 0.5)]
    cure = f"did you mean {near[0]}?" if near else f"its codes are such as {', '.join(sorted(known)[:8])}"
    raise UsageError(f"language {code}: the model has no such language; {cure}")


def name_different_scripts(one: str, other: str) -> bool:
    """Whether two codes name a script each, and not the same one, as `zh-Hans` and `zho_Hant` do."""
    return bool(_scripts_in(one) and _scripts_in(other)) and _scripts_in(one) != _scripts_in(other)


def _scripts_in(code: str) -> set[str]:
    """The script that a code names, if any; the other subtags are regions or variants."""
    return {part for part in re.split("[-_]", code.lower())[1:] if len(part) == 4 and part.isalpha()}


@cache
def scripts_of_language(code: str) -> tuple[str, ...]:
    """The scripts that a language is written in, as the first words of Unicode names; empty if they are not
    known. A code may name the script: `sr-Latn`, `zho_Hans`."""
    for part in code.replace("_", "-").split("-")[1:]:
        if len(part) == 4 and part.isalpha():  # the code of a script, perhaps of one that is not in the table
            return tuple(script for script, names, _ in _scripts() if part.capitalize() in names)
    language = base_language(code)
    scripts = tuple(script for script, _, languages in _scripts() if language in languages)
    return scripts or ("LATIN",) * (len(language) == 2 and common_language(language) is not None)


@cache
def _scripts() -> list[tuple[str, list[str], list[str]]]:
    """Each script by the first word of the Unicode names of its letters, with its codes in ISO 15924 and the
    languages that are written in it. Chinese and Japanese writing count as one script. A language is in
    several lists if it is written in several scripts. All other languages with two-letter codes
    in ISO 639 are written in Latin letters."""
    text = (files("mtrain.config") / "scripts.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines())
    return [(script, codes.split(), languages.split()) for script, codes, languages in rows]


def has_spaces(code: str, script: str = "") -> bool:
    """Whether the words of a language are separated by spaces. If its scripts are not known, `script`
    decides, the one of a text in this language."""
    return are_spaced(scripts_of_language(code) or [script])


def are_spaced(scripts: Iterable[str]) -> bool:
    """Whether words are separated by spaces in all of some scripts."""
    return _WITHOUT_SPACES.isdisjoint(scripts)


def is_right_to_left(code: str) -> bool:
    """Whether a language is only written from right to left."""
    scripts = scripts_of_language(code)
    return bool(scripts) and _RIGHT_TO_LEFT.issuperset(scripts)


def sentence_separator(code: str) -> str:
    """What separates the sentences of a text: nothing in Chinese and Japanese, and a space in all other
    languages, also in languages that do not separate words, such as Thai."""
    return "" if "CJK" in scripts_of_language(code) else " "


def bleu_tokenizer(target_lang: str) -> str:
    """The name of sacreBLEU's tokenizer for a language code."""
    default = "13a" if has_spaces(target_lang) else "char"
    return _BLEU_TOKENIZERS.get(base_language(target_lang), default)


def changed_bleu_tokenizers(target_langs: Iterable[str]) -> list[str]:
    """The tokenizers of languages for which earlier versions used 13a. Recorded scores depend on them, so
    that none by 13a is compared with a new one."""
    same = [code for code in target_langs if code.lower().replace("_", "-").partition("-")[0] in _ALWAYS]
    names = {bleu_tokenizer(code) for code in target_langs if code not in same}
    return sorted(names - {"13a"})


def make_bleu(tokenizer: str, **options: Any) -> "BLEU":
    """sacreBLEU's BLEU with one of its tokenizers and other options. Raises UsageError if a package that the
    tokenizer needs is not installed, or if a file that it needs cannot be downloaded."""
    from sacrebleu.metrics.bleu import BLEU  # here: `mtrain --help` imports this file

    try:
        return BLEU(tokenize=tokenizer, **options)
    except (ImportError, RuntimeError, OSError) as error:
        # In zsh, brackets outside quotes are a pattern of file names.
        reason = re.sub(r"pip install (\S+\[\S+\])", r"pip install '\1'", " ".join(str(error).split()))
        problem = "cannot be downloaded" if isinstance(error, OSError) else "is not installed"
        raise UsageError(f"the BLEU tokenizer {tokenizer} {problem}: {reason}") from None
