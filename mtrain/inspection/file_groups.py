"""Finds out which files belong together and what they are for, by their names alone.

Parallel text files differ in a language: `train.en` and `train.de`, `en/train.txt` and `de/train.txt`; or in
a word for the side: `train.src` and `train.trg`, `src-train.txt` and `tgt-train.txt`. Validation and test
files have words such as `dev` and `test` in their names.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from mtrain.config.language_names import certainty, find_language, languages_in, words_of
from mtrain.data import COMPRESSION
from mtrain.errors import DataError, UsageError

Kind = Literal["text", "tsv", "jsonl", "parquet"]
Role = Literal["train", "validation", "test"]
_ROLES: dict[str, Role] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validset", "validation", "dev", "devel", "devset"), "validation"),
    **dict.fromkeys(("newsdev", "newsdiscussdev", "tune"), "validation"),
    **dict.fromkeys(("test", "testset", "tst", "devtest", "eval", "evaluation", "heldout"), "test"),
    **dict.fromkeys(("newstest", "newsdiscusstest", "newssyscomb"), "test"),
    **dict.fromkeys(("generaltest", "wmttest", "biomedicaltest"), "test"),
}
_SIDE = re.compile(
    r"(?<![A-Za-z\d])(?:(src|source|s1)|trg|tgt|target|ref|reference|s2|t1)(?![A-Za-z\d])", re.IGNORECASE
)
_NEVER = frozenset({"log", "lst", "old", "txt"})  # language codes, but common suffixes of text files
_TRAIN = re.compile(r"(?<![A-Za-z])train(?:ing)?(?![A-Za-z])", re.IGNORECASE)


class Group(NamedTuple):
    """Files that contain the same sentences: text files in different languages, or one other file."""

    files: tuple[str, ...]
    languages: tuple[str | None, ...]  # of each file, by its name
    kind: Kind = "text"


class Roles(NamedTuple):
    """What groups of files are for."""

    train: list[Group]
    validation: list[Group]
    test: list[Group]


class _Mark(NamedTuple):
    """A word by which the name of a file may differ from the names of its partners."""

    file: str
    language: str | None  # its code; None if the word is for a side
    weight: int  # certainty of this meaning, from 0 (only beside a more certain mark) to 3
    place: int  # of the word


def group_text_files(
    files: Sequence[str], given: Collection[str | None] = (), is_all: bool = True
) -> list[Group]:
    """Group text files that differ in a language, or in a word for the side. Two files are always a group, if
    no files of other kinds are given (`is_all`). The files of a group are in the order given, or the source
    first if the names say which it is. `given` are codes of languages that the files are in.

    Raises DataError if a file has no partner.
    """
    groups = _marked_groups(files, given)
    free = {*files} - {file for group in groups for file in group.files}
    if len(files) == 2 and not groups and is_all:
        return [_in_order(Group((*files,), _own_languages(files)))]
    for file in files:
        if file in free:
            cure = "leave it out, or give a source and a target file, and others with --validation and --test"
            raise DataError(f"{file}: no file of the same name in another language is given; {cure}")
    return sorted(groups, key=lambda group: min(map(files.index, group.files)))


def partners(files: Sequence[str], given: Collection[str | None] = ()) -> set[str]:
    """The files whose names say that they are text in one language, or one side, of the same corpus."""
    return {file for group in _marked_groups(files, given) for file in group.files}


def _marked_groups(files: Sequence[str], given: Collection[str | None]) -> list[Group]:
    by_rest: dict[tuple[str, ...], dict[str, _Mark]] = {}
    for file in files:
        for rest, meaning, mark in _marks_of(file, given):
            by_rest.setdefault(rest, {}).setdefault(meaning, mark)
    groups, free = list[Group](), {*files}
    for marks in sorted((found.values() for found in by_rest.values()), key=_certainty, reverse=True):
        group = Group(tuple(mark.file for mark in marks), tuple(mark.language for mark in marks))
        if _certainty(marks)[0] and free.issuperset(group.files):
            groups.append(_in_order(group))
            free -= {*group.files}
    return groups


def _marks_of(file: str, given: Collection[str | None]) -> Iterator[tuple[tuple[str, ...], str, _Mark]]:
    """Yield, for each word of a name that may be its mark, the other words, which partners share; the
    language or side; and the mark. Languages that are `given` are the most certain."""
    name, side = split_side(file, given)
    words = words_of(name)
    if side is not None:
        yield ("source or target", *words), side, _Mark(file, None, 2, len(words))
    codes = [find_language(word) or word.lower() for word in words]
    roles = [word for word in words if word.lower() in _ROLES]
    for place, (word, code) in enumerate(zip(words, codes, strict=True)):
        if code not in given and (word.lower() in _NEVER or [word] == roles or find_language(word) is None):
            continue
        weight = 3 if code in given else certainty(word)
        everywhere = tuple("" if other == code else words[i] for i, other in enumerate(codes))
        for rest in ((*words[:place], "", *words[place + 1 :]), everywhere):  # en/train.en and de/train.de
            yield rest, code, _Mark(file, code, weight, place)


def split_side(name: str, given: Collection[str | None] = ()) -> tuple[str, str | None]:
    """A name without the last word for a side, and the side. `given` words are codes of languages."""
    found = [match for match in _SIDE.finditer(name) if match[0].lower() not in given]
    if not found:
        return name, None
    return f"{name[: found[-1].start()]} {name[found[-1].end() :]}", "source" if found[-1][1] else "target"


def _certainty(marks: Collection[_Mark]) -> tuple[int, int]:
    """How certainly files differ in these marks (0 if they do not), and their last place, to break ties."""
    weights = sorted(mark.weight for mark in marks)
    return sum(weights[-2:]) if len(weights) > 1 else 0, max(mark.place for mark in marks)


def _in_order(group: Group) -> Group:
    """The group with the source first, if the names of two files say which is the source."""
    if [split_side(file)[1] for file in group.files] != ["target", "source"]:
        return group
    return Group(group.files[::-1], group.languages[::-1])


def _own_languages(files: Sequence[str]) -> tuple[str | None, ...]:
    """For each of two files, the language that its name contains more often than the other name, or else
    the rare language of its suffix."""
    words = [[word for word in words_of(file) if f".{word}" not in COMPRESSION] for file in files]
    first, second = (Counter(languages_in(own)) for own in words)
    languages = []
    for certain, own in zip((first - second, second - first), words, strict=True):
        rare = [find_language(word) for word in own[-1:] if certainty(word) == 1]
        languages.append(next(iter(certain if len(certain) == 1 else rare), None))
    return tuple(languages)


def divide_by_role(groups: Sequence[Group]) -> Roles:
    """What each group is for, by the names of its files. A single group is for training.

    Raises UsageError if no group is for training.
    """
    by_role: dict[Role, list[Group]] = {"train": [], "validation": [], "test": []}
    for group in groups:
        by_role["train" if len(groups) == 1 else _role_of(group)].append(group)
    if not by_role["train"]:
        cure = "give validation and test files with --validation and --test"
        raise UsageError(f"the names of all files say validation or test; {cure}")
    return Roles(**by_role)


def _role_of(group: Group) -> Role:
    """The role that the name of the first file says or, if it says nothing, the name of its folder."""
    path = Path(group.files[0])
    return _role_in(path.name) or _role_in(path.parent.name) or "train"


def _role_in(name: str) -> Role | None:
    """The role that the first word for a role says; `devel_test` is for a test."""
    words = [word.lower() for word in words_of(name)]
    roles = [pair for pair in zip(words, [*words[1:], ""], strict=False) if pair[0] in _ROLES]
    if not roles:
        return None
    word, following = roles[0]
    return "test" if following == "test" else _ROLES[word]


def find_siblings(train: Group) -> Roles:
    """The validation and test files beside training files. Their names have another word in the place of
    `train`, such as `val.en` or `test_2016.en` beside `train.en`. At most one group for validation."""
    by_file = [_replacements(Path(file)) for file in train.files]
    common = [words for words in by_file[0] if all(words in found for found in by_file)]
    validation, test = list[Group](), list[Group]()
    for words in sorted(common, key=lambda words: (len(words), words)):
        group = train._replace(files=tuple(str(found[words]) for found in by_file))
        is_validation = _role_in(words) == "validation"
        (validation if is_validation else test).append(group)
    return Roles([], validation[:1], test)


def _replacements(path: Path) -> dict[str, Path]:
    """The files beside a training file by the words that they have instead of `train`."""
    match = _TRAIN.search(path.name)
    if match is None or not path.is_file():
        return {}
    start, end = re.escape(path.name[: match.start()]), re.escape(path.name[match.end() :])
    # They may be compressed in another way, and not divided into as many files.
    end = re.sub("|".join(rf"{re.escape(re.escape(suffix))}$" for suffix in COMPRESSION), "", end)
    end = re.sub(r"\\-\d{5}\\-of\\-\d{5}", r"-00000-of-\\d{5}", end)
    end += "(?:" + "|".join(map(re.escape, COMPRESSION)) + ")?"
    words = "|".join(word for word, role in _ROLES.items() if role != "train")
    pattern = re.compile(rf"{start}((?:{words})(?:[\d._-].*)?){end}", re.IGNORECASE)
    # Of several that differ in their compression, the last one is taken.
    files = sorted(sorted(path.parent.iterdir()), key=lambda file: file.suffix == path.suffix)
    found = ((pattern.fullmatch(file.name), file) for file in files)
    return {match[1]: file for match, file in found if match and file.is_file()}


def names_of_test_sets(groups: Iterable[Group]) -> list[str]:
    """A distinct name for each test set: the first part of its file name, without languages."""
    names: list[str] = []
    for group in groups:
        stem = split_side(Path(group.files[0]).name)[0].partition(".")[0]
        for word in words_of(stem):
            if certainty(word) == 2 or find_language(word) in {*group.languages} - {None}:
                stem = re.sub(rf"(?<![A-Za-z]){word}(?![A-Za-z])", "", stem)
        stem = re.sub(r"[^\w-]+", "", stem).strip("_-") or "test"
        stem = re.sub(r"([_-])[_-]+", r"\1", stem)
        name, number = stem, 2
        while name in names:
            name, number = f"{stem}-{number}", number + 1
        names.append(name)
    return names
