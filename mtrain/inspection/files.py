"""The kind of files, and the texts in them that may be source and target."""

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from mtrain.config.language_names import find_language, languages_in, words_of
from mtrain.data import COMPRESSION
from mtrain.data.reading.files import expand
from mtrain.data.reading.lines import open_blocks, read_lines
from mtrain.errors import DataError, UsageError
from mtrain.inspection.choose_sides import FoundText, with_languages
from mtrain.inspection.file_groups import Group, Kind, group_text_files, partners, split_side
from mtrain.inspection.table_columns import SAMPLE, read_table, text_columns

log = logging.getLogger(__name__)

_KINDS: dict[str, Kind] = {
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
_ADVICE = {  # for unsupported files, by their suffixes
    (".csv", ".xlsx", ".xls", ".ods"): "save the table as TSV (separated by tabs) or Parquet",
    (".tmx", ".xml", ".xliff", ".xlf", ".sdlxliff", ".mxliff", ".po", ".sgm"): (
        "convert it to TSV, with one pair of sentences per line"
    ),
    (".srt", ".vtt"): "keep the sentences only, one per line, the same ones in both files",
    (".zip", ".tar", ".tgz", ".7z"): "unpack it, and give the files in it",
    (".bz2", ".xz", ".lzma"): "decompress it, or compress it with gzip or zstd",
    (".pdf", ".doc", ".docx", ".html", ".rtf"): "save it as plain text, with one sentence per line",
}
_UNSUPPORTED = {suffix: advice for suffixes, advice in _ADVICE.items() for suffix in suffixes}
_TABLES = frozenset({".csv", ".tab", ".tsv", ".xls"})  # suffixes of tables that are also language codes
# How text in XML, talks with headings, and subtitles begin.
_XML = re.compile(rb"<(\?xml|!doctype|!DOCTYPE|srcset|refset|tstset|tmx|xliff)\b")
_HEADINGS = "url|talkid|speaker|keywords|title|description|reviewer|translator"
_HEADING = re.compile(rf"<({_HEADINGS})>\S".encode())
_SUBTITLES = re.compile(rb"(\d+\r?\n)?\d\d:\d\d:\d\d[,.]\d{3} -->|WEBVTT")
_NOTES = re.compile(
    r"(README|LICENSE|DISCLAIMER)(\..*)?|categories\.json|.+\.([\w-]+-)?scores?(\.gz|\.zst)?"
    r"|.+\.(ids|xml|aln|annotation|meta\.jsonl|stats\.json|filters\.json)(\.gz|\.zst)?",
    re.IGNORECASE,
)
_QUOTED = re.compile('"[^"]*"')
_HEAD = 100  # lines that are read to find out what a file contains


def require_files(names: Iterable[str]) -> list[Path]:
    """The files, with patterns expanded. Raises DataError if one is missing, and UsageError if one is given
    twice."""
    seen: dict[tuple[int, int], Path] = {}
    for name in names:
        for file in expand(name):
            if not file.is_file():
                kind = "a folder; give the files in it" if file.is_dir() else "not a regular file"
                raise DataError(f"{file}: {kind if file.exists() else 'no such file'}")
            identity = file.stat().st_dev, file.stat().st_ino
            if identity in seen:
                raise UsageError(f"{file}: given twice; give different files")
            seen[identity] = file
    return [*seen.values()]


def without_notes(names: list[str], given: Collection[str | None] = ()) -> list[str]:
    """The names of files without those that archives and tools have besides a corpus, unless these are all.
    `given` are codes of languages, whose files are kept."""
    paths = [(name, Path(name)) for name in names]
    kept = [name for name, path in paths if _suffix(path)[1:] in given or not _NOTES.fullmatch(path.name)]
    # In the Tatoeba Challenge, `train.id` has identifiers, although its suffix is the code of Indonesian.
    parts = [(name, *name.rpartition(".id")[::2]) for name in kept]
    beside = {name: {f"{stem}.src{end}", f"{stem}.trg{end}"} for name, stem, end in parts}
    kept = [name for name in kept if "id" in given or not beside[name] <= {*names}]
    if not kept or kept == names:
        return names
    log.warning("not used: %s", ", ".join(name for name in names if name not in kept))
    return kept


def groups_of(names: Sequence[str], given: Collection[str | None] = ()) -> list[Group]:
    """The files for one purpose, grouped so that each group is a corpus. `given` are codes of languages,
    whose files are text.

    Raises DataError if the kind of a file is unsupported, if a pattern matches different kinds, if the only
    text file has no columns, and for text files without a partner.
    """
    kinds = _kinds_of(names, given)
    text = [name for name in names if kinds[name] == "text"]
    tables = [Group((name,), (), kind) for name, kind in kinds.items() if kind != "text"]
    groups = [*group_text_files(text, given, is_all=not tables), *tables]
    return sorted(groups, key=lambda group: min(map(names.index, group.files)))


def _kinds_of(names: Sequence[str], given: Collection[str | None]) -> dict[str, Kind]:
    """The kinds of files by their suffixes, unless a suffix is the code of a known or `given` language. Files
    with other suffixes are TSV if each line has a tab. If only one is left, its contents decide."""
    expanded = {name: expand(name) for name in names}
    files = [file for found in expanded.values() for file in found]
    kinds: dict[str, Kind] = {}
    for name, (first, *others) in expanded.items():
        kind = kinds[name] = _kind_by_suffix(first, files, given)
        for file in others:
            if _kind_by_suffix(file, files, given) != kind:
                raise DataError(f"{first} and {file} are of different kinds; give them one by one")
        for file in (first, *others) if kind != "parquet" else ():
            _require_text(file, kind)
    text = [name for name, kind in kinds.items() if kind == "text"]
    for name in {*text} - partners(text, given):
        head = _first_lines(expanded[name][0], _HEAD)
        kinds[name] = "tsv" if head and all("\t" in line for line in head) else "text"
    text = [name for name, kind in kinds.items() if kind == "text"]
    if len(text) == 1:
        kinds[text[0]] = _kind_by_contents(expanded[text[0]][0], text[0])
    return kinds


def _kind_by_contents(file: Path, name: str) -> Kind:
    head = _first_lines(file, _HEAD)
    if head and head[0].startswith("{"):
        return "jsonl"
    if not head or sum("\t" in line for line in head) > len(head) / 2:
        return "tsv"
    cure = "give two files, the source and the target, or a TSV, JSONL or Parquet file with both"
    raise DataError(f"{name}: one column only; {cure}")


def _suffix(file: Path) -> str:
    """The last suffix in lower case, ignoring the suffix of a supported compression."""
    return (file.with_suffix("") if file.suffix in COMPRESSION else file).suffix.lower()


def _kind_by_suffix(file: Path, files: Collection[Path], given: Collection[str | None]) -> Kind:
    suffix = _suffix(file)
    kind = _KINDS.get(suffix, "text")
    if (kind != "text" or suffix in _UNSUPPORTED) and _is_text_in_language(file, files, given):
        return "text"
    if reason := _UNSUPPORTED.get(suffix):
        raise DataError(f"{file}: {suffix} files are not supported; {reason}")
    return kind


def _is_text_in_language(file: Path, files: Collection[Path], given: Collection[str | None]) -> bool:
    """Whether the suffix of a file is the code of a language, not its format: `train.tar` beside `train.en`
    if it is plain text, and `train.csv` if it is plain text but not a table."""
    suffix, code = _suffix(file), _suffix(file)[1:]
    if len(files) < 2 or not (code in given or find_language(code)) or not _is_plain_text(file):
        return False
    if suffix not in _TABLES:
        return True
    stem = "" if code in given else f"{str(file).lower().rpartition(suffix)[0]}."
    others = [other for other in files if _suffix(other) not in _TABLES]
    return any(str(other).lower().startswith(stem) for other in others) and not _is_table(file)


def _is_plain_text(file: Path) -> bool:
    """Whether a file does not begin like an archive, a document or markup."""
    with suppress(DataError), open_blocks(file) as lines:
        head = lines.peek()[:4096].lstrip(b"\xef\xbb\xbf \r\n")
        return b"\0" not in head and not head.startswith((b"<", b"{\\rtf", b"%PDF"))
    return False


def _is_table(file: Path) -> bool:
    """Whether most lines of a file have a tab, or all have the same number of other separators, which are
    not followed by a space as in sentences."""
    head = _first_lines(file, _HEAD)
    cells = ({len(re.findall(rf"{mark}(?! |$)", _QUOTED.sub("", line))) for line in head} for mark in ",;")
    is_regular = any(len(found) == 1 and found != {0} for found in cells)
    return is_regular or sum("\t" in line for line in head) > len(head) / 2


def _require_text(file: Path, kind: Kind) -> None:
    """Raise DataError if a file does not begin with text or, of text without columns, with sentences."""
    with open_blocks(file) as lines:
        head = lines.peek()[:4096]
    if b"\0" in head:  # a single line with NUL further on does not make it another kind
        raise DataError(f"{file}: not a text file")
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if kind == "text" and _SUBTITLES.match(start):
        raise DataError(f"{file}: contains subtitles with times; {_UNSUPPORTED['.srt']}")
    if kind == "text" and _XML.match(start):
        raise DataError(f"{file}: contains XML or SGML; {_UNSUPPORTED['.xml']}")
    if kind == "text" and _HEADING.match(start):
        cure = f"remove such lines from both files: grep -vE '^<({_HEADINGS})>' OLD > NEW"
        shown = start.splitlines()[0][:20].decode(errors="replace")
        raise DataError(f"{file}: begins with markup, {shown}; {cure}")


def sides_of(
    group: Group, keys: Iterable[str | None] = (), languages: Collection[str | None] = ()
) -> list[FoundText]:
    """The texts of a corpus among which the source and the target are: its files, or the columns of its table
    that contain sentences, are among the given `keys`, or are the only ones with the name of one of the given
    `languages`. Raises DataError if there are fewer than two."""
    if group.kind == "text":
        marks = [split_side(file)[1] for file in group.files]
        is_marked = marks == ["source", "target"] and not any(group.languages)
        sides = []
        for index, (file, language) in enumerate(zip(group.files, group.languages, strict=True)):
            texts = _first_lines(expand(file)[0], SAMPLE)
            sides.append(FoundText(file, index, texts, language, kind="text", is_marked=is_marked))
        # Such as `eng-fra/train.src`.
        return with_languages(sides, "/".join(Path(group.files[0]).parts[-2:]) if is_marked else "")
    [file] = group.files
    table = read_table(expand(file)[0], group.kind)
    with_text, given = text_columns(table), {*keys}
    # Most of its texts may be missing.
    wanted = {*languages} - {None, *(_language_of(column.name) for column in with_text)}
    sides = [
        FoundText(column.name, column.key, column.texts, _language_of(column.name), kind=group.kind)
        for column in table.columns
        if column in with_text
        or {column.name, str(column.key)} & given
        or _language_of(column.name) in wanted
    ]
    if len(sides) < 2:
        names = ", ".join(column.name for column in table.columns)
        hint = "; choose with --source-column and --target-column" if len(table.columns) > 1 else ""
        if len(table.columns) == 1 and group.kind == "tsv":
            hint = "; tabs separate columns"
        found = f"{len(sides)} among {names}{hint}" if table.columns else "none"
        raise DataError(f"{file}: two columns of text are needed, source and target; found {found}")
    return with_languages(sides, Path(file).name)


def _first_lines(file: Path, count: int) -> list[str]:
    """The lines of text among the first ones of a file."""
    return [line for line in islice(read_lines(file), count) if isinstance(line, str)]


def _language_of(name: str) -> str | None:
    found = languages_in(words_of(name)) or languages_in(words_of(name)[-1:], 1)
    return found[-1] if found else None
