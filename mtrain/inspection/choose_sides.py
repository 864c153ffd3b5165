"""Which of several texts are the source and the target: files of lines, or columns of a table."""

from collections.abc import Sequence
from typing import NamedTuple

from mtrain.config.language_names import find_language, languages_of_pair, words_of
from mtrain.config.languages import base_language, is_same_language
from mtrain.data.text.identify_language import Identified, identify_language
from mtrain.errors import UsageError
from mtrain.inspection.file_groups import Kind
from mtrain.inspection.table_columns import SOURCE_WORDS, TARGET_WORDS


class FoundText(NamedTuple):
    """A text that may be the source or the target."""

    name: str  # of the file, column or field
    key: int | str  # what the config calls it
    texts: Sequence[str]  # a sample
    named: str | None = None  # the language that a name gives
    identified: Identified | None = None  # the language that the text seems to be in
    kind: Kind = "tsv"  # of its file; a text file has the place among the others that the user chose
    is_marked: bool = False  # its name contains no language, but a word such as `src` or `tgt`
    given: str | None = None  # the language that the user gives

    @property
    def is_number(self) -> bool:
        """Whether it is a column without a name."""
        return self.name == str(self.key) and isinstance(self.key, int)

    @property
    def language(self) -> str | None:
        """The language given by the user, the name or else the text; None if it is unknown."""
        return self.given or self.named or self.seen

    @property
    def seen(self) -> str | None:
        """The language that the text seems to be in; None if its parts seem to be in several."""
        return self.identified.code if self.identified and self.identified.is_uniform else None

    @property
    def is_misnamed(self) -> bool:
        """Whether the text is not in the language given by the user or the name."""
        language = self.given or self.named
        return bool(language and self.identified and self.identified.is_not(language))


class ChosenSides(NamedTuple):
    """The source and the target. `certain` is whether nothing else could be meant, `by_key` whether a column
    was chosen by its key or name."""

    source: FoundText
    target: FoundText
    certain: bool = True
    by_key: bool = False

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """The languages; None for both if they seem to be the same one, which cannot be translated."""
        source, target = self.source.language, self.target.language
        return (None, None) if is_same_language(source, target) else (source, target)

    def with_given(self, source: str | None, target: str | None) -> "ChosenSides":
        """The sides, in the languages that the user gives."""
        return self._replace(
            source=self.source._replace(given=source), target=self.target._replace(given=target)
        )

    def exchanged_if(self, are_exchanged: bool) -> "ChosenSides":
        """The sides, exchanged if `are_exchanged`."""
        return self._replace(source=self.target, target=self.source) if are_exchanged else self


def with_languages(sides: Sequence[FoundText], file: str) -> list[FoundText]:
    """Add the languages of the texts, as far as their contents tell. If there are two texts in a file whose
    name has two languages, such as `en-de.tsv`, these are used; the contents tell which is which."""
    found = [side._replace(identified=identify_language(side.texts, by_parts=True)) for side in sides]
    codes = languages_of_pair(file)
    if len(found) != 2 or len(codes) != 2 or any(side.named for side in found):
        return found
    if all(side.identified and all(map(side.identified.is_not, codes)) for side in found):
        return found  # they are words, as in `is-it`
    # Both may seem to be in the same language, if the other one is similar to it, or not known.
    seen = [side.seen for side in found]
    if sum(map(is_same_language, seen, codes[::-1])) > sum(map(is_same_language, seen, codes)):
        codes.reverse()
    return [side._replace(named=code) for side, code in zip(found, codes, strict=True)]


def choose_sides(
    sides: Sequence[FoundText], keys: tuple[str | None, str | None], languages: tuple[str | None, str | None]
) -> ChosenSides:
    """Choose the source and the target among at least two texts: by the given keys or names, by the given
    languages, by their own names, or else the first two. Two files keep their order, unless their names say
    which one is the source. Raises UsageError if a given key or name is missing.
    """
    if len(sides) == 2 and all(side.is_marked for side in sides):
        return ChosenSides(sides[0], sides[1])
    wanted = zip(keys, languages, strict=True)
    source, target = (_by_key(sides, key) or _by_language(sides, language) for key, language in wanted)
    if source is not None and source is target:
        if all(keys) or not any(keys):
            raise UsageError(f"{source.name}: source and target are the same; give two")
        source, target = (source, None) if keys[0] else (None, target)
    if source is not None and target is not None:
        return ChosenSides(source, target, by_key=any(keys))
    if source is not None or target is not None:
        rest = [side for side in sides if side is not source and side is not target]
        rest = _with_word(rest, TARGET_WORDS if target is None else SOURCE_WORDS) or rest
        return ChosenSides(source or rest[0], target or rest[0], len(rest) == 1, any(keys))
    return _choose_two(sides)


def _choose_two(sides: Sequence[FoundText]) -> ChosenSides:
    """Two of some texts, of which none was asked for."""
    sources, targets = _with_word(sides, SOURCE_WORDS), _with_word(sides, TARGET_WORDS)
    are_files = len(sides) == 2 and sides[0].kind == "text"
    if len(sources) == len(targets) == 1 and sources != targets and not are_files:
        return ChosenSides(sources[0], targets[0])
    if len(sides) == 2:
        return ChosenSides(sides[0], sides[1])
    named = [side for side in sides if side.named]
    if len(named) == 2 and named[0].named != named[1].named:
        return ChosenSides(named[0], named[1])
    sides = named if len({base_language(str(side.named)) for side in named}) > 1 else sides
    others = [side for side in sides if side.language != sides[0].language] or sides[1:]
    # Rather another language than a variant of the same one.
    translations = [side for side in others if not is_same_language(side.language, sides[0].language)]
    return ChosenSides(sides[0], (translations or others)[0], certain=False)


def _by_key(sides: Sequence[FoundText], key: str | None) -> FoundText | None:
    if key is None:
        return None
    found = [side for side in sides if key in (str(side.key), side.name)]
    if not found:
        names = (f"{side.key}" + f" ({side.name})" * (side.name != str(side.key)) for side in sides)
        raise UsageError(f"no column {key}; choose from {', '.join(names)}")
    return found[0]


def _by_language(sides: Sequence[FoundText], language: str | None) -> FoundText | None:
    """The only text in a language: with the same region or script, or else with any."""
    code = None if language is None else find_language(language) or language
    found = [side for side in sides if is_same_language(side.language, code)]
    found = [side for side in found if side.language == code] or found
    found = [side for side in found if side.named] or found  # rather than a text that seems to be in it
    return found[0] if len(found) == 1 else None


def _with_word(sides: Sequence[FoundText], words: frozenset[str]) -> list[FoundText]:
    return [side for side in sides if words & {word.lower() for word in words_of(side.name)}]
