"""What `mtrain init` finds in corpora: how a config describes them, their pairs, and how many there are."""

import logging
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import TypeAdapter

from mtrain.config.languages import is_same_language
from mtrain.config.sections.corpora import Corpus, ParquetCorpus
from mtrain.data import Pair
from mtrain.data.reading.blocks import parse_block, read_blocks
from mtrain.data.reading.files import expand, files_of
from mtrain.data.reading.parquet import count_rows
from mtrain.errors import DataError, UsageError
from mtrain.inspection.choose_sides import ChosenSides, FoundText, choose_sides
from mtrain.inspection.file_groups import Group, Roles, split_side
from mtrain.inspection.files import sides_of
from mtrain.inspection.table_columns import Table, read_table, text_columns
from mtrain.progress_bar import ProgressBar

log = logging.getLogger(__name__)

_PARSED = 100  # blocks of pairs whose text is checked; later ones are counted
_BAD = 0.1  # share of unreadable pairs from which on a corpus is not accepted


class InspectedCorpus(NamedTuple):
    """A corpus, and what it contains."""

    group: Group
    sides: ChosenSides
    pairs: int
    unreadable: int
    problem: str  # of the first unreadable pair
    first: Pair  # that has text on both sides


class Inspected(NamedTuple):
    """The corpora of a new config."""

    train: list[InspectedCorpus]
    validation: list[InspectedCorpus]
    test: list[InspectedCorpus]


def inspect_corpora(roles: Roles, siblings: Roles, sides: ChosenSides) -> Inspected:
    """Inspect all corpora; `sides` are those of the first. `siblings` are validation and test files that were
    found beside the training files; they are used where `roles` has none, and left out with a warning if they
    cannot be read.

    Raises the errors of `inspect_corpus` for the others, and DataError if names say other languages.
    """

    def inspect(group: Group) -> InspectedCorpus:
        return inspect_corpus(group, sides if group is roles.train[0] else _sides_in(group, sides))

    train, validation, test = ([*map(inspect, groups)] for groups in roles)
    given = {path for groups in roles for group in groups for path in _paths(group)}
    for found, groups in ((validation, siblings.validation), (test, siblings.test)):
        for group in groups if not found else ():
            if given & _paths(group):
                continue
            try:
                found.append(inspect(group))
            except (DataError, UsageError) as error:
                log.warning("not used: %s", error)
    return Inspected(train, validation, test)


def _paths(group: Group) -> set[Path]:
    """The files of a group, however their names are written."""
    return {path.resolve() for name in group.files for path in expand(name)}


def inspect_corpus(group: Group, sides: ChosenSides) -> InspectedCorpus:
    """Count the pairs of a corpus, and check the text of the first million.

    Raises DataError if there is no pair, if the sides differ in length, or if many pairs cannot be read.
    """
    corpus: Corpus = TypeAdapter(Corpus).validate_python(spec_of(group, sides))
    pairs = parsed = 0
    errors: list[DataError] = []
    first: Pair | None = None
    with ProgressBar("read", "pairs") as progress:
        for number, raw in enumerate(read_blocks(corpus)):
            progress.add(raw.end.first - raw.first)
            pairs = raw.end.first - 1
            if number < _PARSED:
                block, parsed = parse_block(raw, corpus), pairs
                errors += block.errors.values()
                if first is None and (usable := block.usable()).sources:
                    first = Pair(usable.sources[0], usable.targets[0])
            elif isinstance(corpus, ParquetCorpus):  # whose rows are slow to read
                pairs = count_rows(files_of(corpus))
                break
    name = " and ".join(group.files)
    if len(errors) > _BAD * parsed:
        hint = (
            "; convert it: iconv -f LATIN1 -t UTF-8 OLD > NEW" if "not valid UTF-8" in str(errors[0]) else ""
        )
        raise DataError(f"{name}: {len(errors):,} of {parsed:,} pairs cannot be read: {errors[0]}{hint}")
    if first is None:
        raise DataError(f"{name}: no pair of sentences")
    return InspectedCorpus(group, sides, pairs, len(errors), str(errors[0]) if errors else "", first)


def _sides_in(group: Group, first: ChosenSides) -> ChosenSides:
    """The sides of a corpus, by those of the first: the same ones, unless it is of another kind, or a table
    with other columns. Raises DataError if its names say other languages."""
    chosen, is_same_kind = first[:2], group.kind == first.source.kind
    if is_same_kind and group.kind == "text":
        return first
    if group.kind != "text":
        table = read_table(expand(group.files[0])[0], group.kind)
        named = {column.name: column for column in reversed(table.columns)}
        if all(side.name in named and not side.is_number for side in chosen):
            source, target = (FoundText(*named[side.name], kind=group.kind) for side in chosen)
            return first if is_same_kind else ChosenSides(source, target)
        has_keys = {side.key for side in chosen} <= {column.key for column in table.columns}
        if is_same_kind and has_keys and (first.by_key or len(text_columns(table)) < 2):
            return first
    found = sides_of(group, languages=first.languages)
    own = {side.key: side for side in found}
    if is_same_kind and all(side.key in own and not _differs(own[side.key], side) for side in chosen):
        return first
    sides = choose_sides(found, (None, None), first.languages)
    names = " and ".join(group.files)
    if not sides.certain:
        log.warning("%s: using columns %s and %s", names, sides.source.name, sides.target.name)
    for side, other in zip(sides[:2], chosen, strict=True):
        if _differs(side, other) and side.named:
            raise DataError(f"{names}: the names say {side.named}, not {other.language}; leave them out")
        if _differs(side, other):
            log.warning("%s: %s does not seem to be in %s", names, side.name, other.language)
    return sides


def _differs(side: FoundText, first: FoundText) -> bool:
    """Whether a text is not in the language of another one. Its name alone says so only if the text is too
    short."""
    if first.language is None or is_same_language(side.language, first.language):
        return False
    return side.identified.is_not(first.language) if side.identified else side.named is not None


def spec_of(group: Group, sides: ChosenSides) -> dict[str, Any]:
    """The corpus of a group of files as a config describes it. Raises DataError if the group lacks one of the
    languages of the sides."""
    if group.kind == "text":
        of_source, of_target = _places_of(group, sides)
        return {"source": group.files[of_source], "target": group.files[of_target]}
    [file] = group.files
    source, target = sides.source.key, sides.target.key
    if group.kind != "tsv":
        return {group.kind: file, "source_field": source, "target_field": target}
    table = read_table(expand(file)[0], group.kind)
    source, target = (_number_of(side, table) for side in (sides.source, sides.target))
    columns = {"source_column": source, "target_column": target} if (source, target) != (0, 1) else {}
    flags = {"header": table.header, "quotes": table.quotes}
    return {"tsv": file, **columns, **{key: True for key, value in flags.items() if value}}


def _number_of(side: FoundText, table: Table) -> int:
    """The number of a side's column. A header may have the name of the side in another place than the first
    file."""
    number, names = cast(int, side.key), [column.name for column in table.columns]
    is_there = names[number : number + 1] == [side.name]  # several columns may have this name
    return number if is_there or not table.header or side.name not in names else names.index(side.name)


def _places_of(group: Group, sides: ChosenSides) -> tuple[int, int]:
    """The places of source and target among the files of a group. If the names say the side, and no
    language, the source is first. If they say the language, the files are in any order. Otherwise, they are
    in the order of the first files."""
    if not any(group.languages) and [split_side(file)[1] for file in group.files] == ["source", "target"]:
        return 0, 1
    if all(group.languages):
        source, target = (_place_of(group, side) for side in (sides.source, sides.target))
        if len(group.files) == 2:  # one language tells both sides
            source = 1 - target if source is None and target is not None else source
            target = 1 - source if target is None and source is not None else target
        if source is not None and target is not None and source != target:
            return source, target
    return cast(int, sides.source.key), cast(int, sides.target.key)


def _place_of(group: Group, side: FoundText) -> int | None:
    """The place of the only file in the language of a side. None if there is not exactly one, unless the name
    of the side has its language, which raises DataError."""
    language = side.named or side.language
    same = [place for place, code in enumerate(group.languages) if is_same_language(code, language)]
    found = [place for place in same if group.languages[place] == language] or same
    if len(found) != 1 and side.named is not None:
        raise DataError(f"{group.files[0]}: no file in the language {side.named} is given for it")
    return found[0] if len(found) == 1 else None
