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
from mtrain.errors import DataError
from mtrain.inspection.choose_sides import ChosenSides, FoundText
from mtrain.inspection.file_groups import Group, Roles, split_side
from mtrain.inspection.files import Kind
from mtrain.inspection.table_columns import Table, read_table
from mtrain.progress_bar import ProgressBar

log = logging.getLogger(__name__)

_PARSED = 100  # blocks of pairs whose text is checked; later ones are counted
_BAD = 0.1  # share of unreadable pairs from which on a corpus is not accepted


class InspectedCorpus(NamedTuple):
    """A corpus, and what it contains."""

    group: Group
    pairs: int
    unreadable: int
    problem: str  # of the first unreadable pair
    first: Pair  # that has text on both sides


class Inspected(NamedTuple):
    """The corpora of a new config."""

    train: list[InspectedCorpus]
    validation: list[InspectedCorpus]
    test: list[InspectedCorpus]


def inspect_corpora(roles: Roles, siblings: Roles, kind: Kind, sides: ChosenSides) -> Inspected:
    """Inspect all corpora. `siblings` are validation and test files that were found beside the training
    files; they are used where `roles` has none, and left out with a warning if they cannot be read.

    Raises the errors of `inspect_corpus` for the others.
    """
    train, validation, test = ([inspect_corpus(group, kind, sides) for group in groups] for groups in roles)
    given = {path for groups in roles for group in groups for path in _paths(group)}
    for found, groups in ((validation, siblings.validation), (test, siblings.test)):
        for group in groups if not found else ():
            if given & _paths(group):
                continue
            try:
                found.append(inspect_corpus(group, kind, sides))
            except DataError as error:
                log.warning("not used: %s", error)
    return Inspected(train, validation, test)


def _paths(group: Group) -> set[Path]:
    """The files of a group, however their names are written."""
    return {path.resolve() for name in group.files for path in expand(name)}


def inspect_corpus(group: Group, kind: Kind, sides: ChosenSides) -> InspectedCorpus:
    """Count the pairs of a corpus, and check the text of the first million.

    Raises DataError if there is no pair, if the sides differ in length, or if many pairs cannot be read.
    """
    corpus: Corpus = TypeAdapter(Corpus).validate_python(spec_of(group, kind, sides))
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
    return InspectedCorpus(group, pairs, len(errors), str(errors[0]) if errors else "", first)


def spec_of(group: Group, kind: Kind, sides: ChosenSides) -> dict[str, Any]:
    """The corpus of a group of files as a config describes it. Raises DataError if the group lacks one of the
    languages of the sides."""
    if kind == "text":
        return {"source": _file_of(group, sides.source, 0), "target": _file_of(group, sides.target, 1)}
    [file] = group.files
    source, target = sides.source.key, sides.target.key
    if kind != "tsv":
        return {kind: file, "source_field": source, "target_field": target}
    table = read_table(expand(file)[0], kind)
    source, target = (_number_of(side, table) for side in (sides.source, sides.target))
    columns = {"source_column": source, "target_column": target} if (source, target) != (0, 1) else {}
    flags = {"header": table.header, "quotes": table.quotes}
    return {kind: file, **columns, **{key: True for key, value in flags.items() if value}}


def _number_of(side: FoundText, table: Table) -> int:
    """The number of a side's column. A header may have the name of the side in another place than the first
    file."""
    number, names = cast(int, side.key), [column.name for column in table.columns]
    is_there = names[number : number + 1] == [side.name]  # several columns may have this name
    return number if is_there or not table.header or side.name not in names else names.index(side.name)


def _file_of(group: Group, side: FoundText, place: int) -> str:
    """The file of a side; `place` is 0 for the source and 1 for the target. If the names say the side, and no
    language, the source is first. If they say the language, the files are in any order."""
    if not any(group.languages) and [split_side(file)[1] for file in group.files] == ["source", "target"]:
        return group.files[place]
    language = side.named or side.language
    same = [i for i, code in enumerate(group.languages) if is_same_language(code, language)]
    exact = [i for i in same if group.languages[i] == language]
    if all(group.languages) and len(found := exact or same) == 1:
        return group.files[found[0]]
    if all(group.languages) and side.named is not None:
        raise DataError(f"{group.files[0]}: no file in the language {side.named} is given for it")
    return group.files[cast(int, side.key)]
