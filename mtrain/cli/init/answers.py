"""What `mtrain init` decides by options, by what it found, or by asking on a terminal."""

import logging
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from mtrain.cli.console.terminal import print_to_stderr, require_unicode, shown_in_line
from mtrain.config.language_names import find_language, language_name
from mtrain.config.languages import is_same_language
from mtrain.config.new_config import holdout_size
from mtrain.data.text.identify_language import EXTRA, can_identify
from mtrain.errors import MtrainError, UsageError
from mtrain.inspection.choose_sides import ChosenSides, FoundText, choose_sides
from mtrain.inspection.corpora import Inspected
from mtrain.invisible_characters import escape_control_characters

log = logging.getLogger(__name__)

T = TypeVar("T")
Languages = tuple[str, str]
_MINUTES = 60.0
_FEW = 1000  # training pairs
_CODE = re.compile(r"[a-z]{2,3}(-\w+)?")  # of a language without a code of two letters, such as nds
_SHOWN = 60  # characters of a sentence


def _show(text: str) -> str:
    """The beginning of a sentence."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class Given(NamedTuple):
    """What the options say, and whether to ask for the rest."""

    columns: tuple[str | None, str | None]  # of source and target
    languages: tuple[str | None, str | None]
    max_minutes: float | None
    asks: bool


def settle_sides(candidates: Sequence[FoundText], given: Given) -> ChosenSides:
    """The source and the target among several texts. Raises UsageError if there is no good guess."""
    source, target = given.languages
    chosen = choose_sides(candidates, given.columns, given.languages).with_given(source, target)
    if chosen.certain:
        return chosen
    if given.asks:
        return _ask_for_sides(candidates, chosen).with_given(source, target)
    named = [side.named for side in candidates]
    if None not in named and len(set(named)) == len(named):
        found = ", ".join(map(str, named))
        raise UsageError(f"found the languages {found}; choose two with --source-lang and --target-lang")
    known = ", ".join(str(side.key) for side in candidates)
    used = f"{chosen.source.key} and {chosen.target.key} of {known}"
    log.warning("using columns %s; --source-column and --target-column choose others", used)
    return chosen


def settle_languages(sides: ChosenSides, given: Given) -> tuple[Languages, bool]:
    """The languages, and whether the answer names those of the sides in the other order.

    Raises UsageError if nobody can be asked and a language is unknown or both are the same.
    """
    found = [code or guess for code, guess in zip(given.languages, sides.languages, strict=True)]
    for side, code in zip(sides[:2], given.languages, strict=True):
        if code and side.named and not is_same_language(code, side.named):
            log.warning("%s: its name says %s, not %s", side.name, side.named, code)
    if not given.asks or all(given.languages):
        return _require_languages(sides, found[0], found[1]), False
    languages = _ask_for_languages(found)
    return languages, all(map(is_same_language, languages, sides.languages[::-1]))


def settle_minutes(given: Given) -> float | None:
    """The minutes that training may take; None if they are not limited."""
    minutes = given.max_minutes
    if minutes is None:
        minutes = _ask_for_minutes() if given.asks else _MINUTES
    return minutes or None


# What tables have instead of missing texts, and the share from which on that is noticed.
_PLACEHOLDER = re.compile(r"[_ ]*NULL[_ ]*|null|NaN|nan|#?N/A|#VALUE!|#REF!|<range>")
_MISSING = 0.005


def show_corpora(found: Inspected, sides: ChosenSides) -> None:
    """Log what was found, so that a wrong guess is seen, and what may be wrong with it."""
    for name, corpora in found._asdict().items():
        for corpus in corpora:
            log.info("%s: %s, %s pairs", name, " and ".join(corpus.group.files), f"{corpus.pairs:,}")
            if corpus.problem:
                log.warning("%s pairs cannot be read: %s", f"{corpus.unreadable:,}", corpus.problem)
    pairs = sum(corpus.pairs for corpus in found.train)
    if not found.validation:
        log.info("validation: %s of these pairs, which are not trained on", f"{holdout_size(pairs):,}")
    for name, side, text in zip(("source", "target"), sides[:2], found.train[0].first, strict=True):
        language = language_name(side.language) if side.language else "language unknown"
        place = f"column {side.name}" if side.name == str(side.key) else side.name
        log.info("%s: %s (%s): %s", name, place, language, _show(text))
        missing = [each for each in side.texts if _PLACEHOLDER.fullmatch(each)]
        if len(missing) > _MISSING * len(side.texts):
            share = len(missing) / len(side.texts)
            log.warning("%s: %.0f%% of the texts are %s; remove these pairs", place, 100 * share, missing[0])
    for side in sides[:2]:
        if side.is_misnamed:
            perhaps = f", but perhaps {language_name(side.seen)}" if side.seen else ""
            wrong = language_name(str(side.language))
            log.warning("%s: the text does not seem to be %s%s", side.name, wrong, perhaps)
    if pairs < _FEW:
        log.warning("only %s training pairs: a useful model needs many thousands", f"{pairs:,}")


def _words(answer: str) -> list[str]:
    """Split an answer at commas or, if it has none, at spaces."""
    return [*map(str.strip, answer.split(","))] if "," in answer else answer.split()


def _ask_for_sides(sides: Sequence[FoundText], chosen: ChosenSides) -> ChosenSides:
    """Ask which of several texts are source and target."""

    def parse(answer: str) -> ChosenSides:
        if answer == suggested:  # names may have commas
            return chosen
        words = _words(answer)
        if len(words) != 2:
            raise UsageError(
                "give two of them, source and target, with a comma between names that have spaces"
            )
        return choose_sides(sides, (words[0], words[1]), (None, None))

    for side in sides:
        name = "" if side.name == str(side.key) else f" ({shown_in_line(side.name)})"
        text = shown_in_line(_show(next(filter(str.strip, side.texts), "")))
        print(f"  {shown_in_line(str(side.key))}{name}: {text}", file=sys.stderr)
    suggested = f"{chosen.source.key}, {chosen.target.key}"
    return _ask("Which of these are source and target", suggested, parse)


def _ask_for_languages(suggested: Sequence[str | None]) -> Languages:
    """Ask for the languages of source and target."""

    def parse(answer: str) -> Languages:
        words = _words(answer)
        if len(words) == 1 and (words[0].islower() or not find_language(words[0])):  # en-ca, but not pt-BR
            words = words[0].split("-")
        codes = [find_language(word) or (word if _CODE.fullmatch(word) else None) for word in words]
        if len(words) != 2 or not all(codes):
            raise UsageError("give two codes or English names of languages, such as en de or English German")
        return _require_different(str(codes[0]), str(codes[1]))

    source, target = suggested
    known, meaning = "", ", such as en de"
    if source and target and not is_same_language(source, target):
        known, meaning = f"{source} {target}", f", {language_name(source)} to {language_name(target)}"
    return _ask(f"Languages of source and target{meaning}", known, parse)


def _ask_for_minutes() -> float:
    """Ask for the time that training may take. 0 is no limit."""

    def parse(answer: str) -> float:
        with suppress(ValueError):
            if 0 <= (minutes := float(answer)) <= 1e9:
                return minutes
        raise UsageError("give a number of minutes up to 1000000000, or 0")

    return _ask("Minutes that training may take, 0 for no limit", f"{_MINUTES:g}", parse)


def _require_languages(sides: ChosenSides, source: str | None, target: str | None) -> Languages:
    """The languages, if both are known. Raises UsageError that says what to do otherwise."""
    if source and target:
        return _require_different(source, target)
    options = [f"--{name}-lang" for name, code in (("source", source), ("target", target)) if not code]
    names = f"{sides.source.name} and {sides.target.name}"
    if is_same_language(sides.source.language, sides.target.language):
        problem = f"{names}: both seem to be {language_name(str(sides.source.language))}"
    else:
        problem = f"{names}: the languages are not known"
    hint = "" if can_identify() else f"; or install language identification: {EXTRA}"
    raise UsageError(f"{problem}; give {' and '.join(options)}{hint}")


def _require_different(source: str, target: str) -> Languages:
    """Two languages. Raises UsageError if they are the same, also in different regions or scripts."""
    if is_same_language(source, target):
        raise UsageError(f"{source} and {target} are the same language; give two different ones")
    return source, target


def _ask(question: str, suggested: str, parse: Callable[[str], T]) -> T:
    """Ask until the answer is valid. Raises UsageError at the end of input."""
    while True:
        hint = f" [{suggested}]" if suggested else ""
        sys.stderr.write(escape_control_characters(f"{question}{hint}: "))
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            print_to_stderr("")
            raise UsageError("no answer; nothing was written")
        try:
            return parse(require_unicode(line).strip() or suggested)
        except MtrainError as error:
            print_to_stderr(f"{line.strip()}: {error}")
