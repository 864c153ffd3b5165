"""The kind of files, and the texts in them that may be source and target."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from mtrain.config.language_names import languages_in, words_of
from mtrain.data import COMPRESSION
from mtrain.data.corpus_files import expand
from mtrain.data.lines import open_blocks, read_lines
from mtrain.errors import DataError, UsageError
from mtrain.inspection.choose_sides import Side, with_languages
from mtrain.inspection.file_groups import Group, group_text_files
from mtrain.inspection.table_columns import SAMPLE, read_table, text_columns

Kind = Literal["text", "tsv", "jsonl", "parquet"]
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
_UNSUPPORTED = {
    **dict.fromkeys(
        (".csv", ".xlsx", ".xls", ".ods"), "save the table as TSV (separated by tabs) or Parquet"
    ),
    **dict.fromkeys(
        (".tmx", ".xml", ".xliff", ".sgm"), "convert it to TSV, with one pair of sentences per line"
    ),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z"), "unpack it, and give the files in it"),
    **dict.fromkeys((".bz2", ".xz", ".lzma"), "decompress it, or compress it with gzip or zstd"),
    **dict.fromkeys((".pdf", ".doc", ".docx"), "save it as plain text, with one sentence per line"),
}


def require_files(names: Iterable[str]) -> list[Path]:
    """The files, and those that patterns stand for. Raises DataError if one is missing or unsupported, and
    UsageError if one is given twice."""
    seen: dict[tuple[int, int], Path] = {}
    for name in names:
        for file in expand(name):
            if not file.is_file():
                kind = "a folder; give the files in it" if file.is_dir() else "not a regular file"
                raise DataError(f"{file}: {kind if file.exists() else 'no such file'}")
            if reason := _UNSUPPORTED.get(_suffix(file)):
                raise DataError(f"{file}: {_suffix(file)} files are not supported; {reason}")
            identity = file.stat().st_dev, file.stat().st_ino
            if identity in seen:
                raise UsageError(f"{file}: given twice; give different files")
            seen[identity] = file
    return [*seen.values()]


def kind_of(train: Sequence[str], others: Sequence[str] = ()) -> Kind:
    """The kind of training files and of others, by their suffixes. If there is one training file with another
    suffix, its contents tell.

    Raises DataError if the kinds differ, or if the only training file is text without columns.
    """
    names = [*train, *others]
    files = [expand(name)[0] for name in names]
    kinds = [_KINDS.get(_suffix(file), "text") for file in files]
    if len(set(kinds)) > 1:
        other = next(name for name, kind in zip(names, kinds, strict=True) if kind != kinds[0])
        raise DataError(f"{names[0]} and {other} are of different kinds; give files of one kind")
    [kind] = set(kinds)
    for file in files if kind != "parquet" else ():
        _require_text(file)
    if kind != "text" or len(train) > 1:
        return kind
    head = [line for line in islice(read_lines(files[0]), 100) if isinstance(line, str)]
    if head and head[0].startswith("{"):
        return "jsonl"
    if not head or sum("\t" in line for line in head) > len(head) / 2:
        return "tsv"
    raise DataError(
        f"{names[0]}: one column only; give two files, the source and the target, or a TSV, JSONL or Parquet "
        "file with both"
    )


def _suffix(file: Path) -> str:
    """The last suffix in lower case, but for that of a supported compression."""
    return (file.with_suffix("") if file.suffix in COMPRESSION else file).suffix.lower()


def _require_text(file: Path) -> None:
    """Raise DataError if a file does not begin with text."""
    with open_blocks(file) as lines:
        if b"\0" in lines.peek()[:4096]:  # a single line with NUL further on does not make it another kind
            raise DataError(f"{file}: not a text file")


def groups_of(names: Sequence[str], kind: Kind) -> list[Group]:
    """The files grouped so that each group is a corpus. Raises the errors of `group_text_files`."""
    return group_text_files(names) if kind == "text" else [Group((name,), ()) for name in names]


def sides_of(group: Group, kind: Kind, keys: Iterable[str | None]) -> list[Side]:
    """The texts of a corpus among which the source and the target are: its files, or the columns of its table
    that contain sentences or are among the given `keys`. Raises DataError if there are fewer than two."""
    if kind == "text":
        sides = [
            Side(file, index, _sample_of(file), language, is_file=True)
            for index, (file, language) in enumerate(zip(group.files, group.languages, strict=True))
        ]
        return with_languages(sides, "")
    [file] = group.files
    table = read_table(expand(file)[0], kind)
    columns = text_columns(table)
    columns = [
        column for column in table.columns if column in columns or {column.name, str(column.key)} & {*keys}
    ]
    sides = [Side(column.name, column.key, column.texts, _language_of(column.name)) for column in columns]
    if len(sides) < 2:
        found = ", ".join(column.name for column in table.columns)
        hint = "; choose with --source-column and --target-column" if len(table.columns) > 1 else ""
        raise DataError(
            f"{file}: two columns of text are needed, source and target; "
            + (f"found {len(sides)} among {found}{hint}" if table.columns else "found none")
        )
    return with_languages(sides, Path(file).name)


def _sample_of(file: str) -> list[str]:
    return [line for line in islice(read_lines(expand(file)[0]), SAMPLE) if isinstance(line, str)]


def _language_of(name: str) -> str | None:
    found = languages_in(words_of(name))
    return found[-1].code if found else None
