"""Which files belong together and what they are for, by their names alone.

Parallel text files differ in a language: `train.en` and `train.de`, `en/train.txt` and `de/train.txt`.
Validation and test files have words such as `dev` and `test` in their names.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from mtrain.config.language_names import languages_in, words_of
from mtrain.errors import DataError, UsageError

Role = Literal["train", "validation", "test"]
_ROLES: dict[str, Role] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "devel"), "validation"),
    **dict.fromkeys(("test", "tst", "newstest", "devtest"), "test"),
}
_TRAIN = re.compile(r"(?<![A-Za-z])train(?:ing)?(?![A-Za-z])", re.IGNORECASE)


class Group(NamedTuple):
    """Files that contain the same sentences: text files in different languages, or one other file."""

    files: tuple[str, ...]
    languages: tuple[str | None, ...]  # of each file, by its name


class Roles(NamedTuple):
    """What groups of files are for."""

    train: list[Group]
    validation: list[Group]
    test: list[Group]


def group_text_files(files: Sequence[str]) -> list[Group]:
    """Group text files that differ in a language. Two files are always a group.

    Raises DataError if a file belongs to no other one.
    """
    by_other_words: dict[tuple[str, ...], dict[str, str]] = {}  # file by language
    for file in files:
        words = words_of(file)
        for place, code in languages_in(words):
            key = (*words[:place], "", *words[place + 1 :])
            by_other_words.setdefault(key, {}).setdefault(code, file)
    groups = [Group((*found.values(),), (*found,)) for found in by_other_words.values() if len(found) > 1]
    if len(files) == 2 and not groups:
        return [Group((*files,), _own_languages(files))]
    grouped = [file for group in groups for file in group.files]
    for file in files:
        if grouped.count(file) != 1:
            raise DataError(
                f"{file}: no file of the same name in another language is given; leave it out, or give a "
                "source and a target file, and others with --validation and --test"
            )
    return groups


def _own_languages(files: Sequence[str]) -> tuple[str | None, ...]:
    """The language that the name of each of two files contains more often than that of the other."""
    found = [Counter(language.code for language in languages_in(words_of(file))) for file in files]
    own = [found[0] - found[1], found[1] - found[0]]
    return tuple(next(iter(codes)) if len(codes) == 1 else None for codes in own)


def divide_by_role(groups: Sequence[Group]) -> Roles:
    """What each group is for, by the names of its files. A single group is for training.

    Raises UsageError if no group is for training.
    """
    by_role: dict[Role, list[Group]] = {"train": [], "validation": [], "test": []}
    for group in groups:
        by_role["train" if len(groups) == 1 else _role_of(group)].append(group)
    if not by_role["train"]:
        raise UsageError(
            "the names of all files say validation or test; name those with --validation, --test"
        )
    return Roles(**by_role)


def _role_of(group: Group) -> Role:
    """The role that the name of the first file says or, if it says nothing, that of its folder."""
    path = Path(group.files[0])
    for name in (path.name, path.parent.name):
        for word in words_of(name):
            if word.lower() in _ROLES:
                return _ROLES[word.lower()]
    return "train"


def find_siblings(train: Group) -> Roles:
    """The validation and test files beside training files: those whose names have another word in the place
    of `train`, such as `val.en` or `test_2016.en` beside `train.en`. At most one group for validation."""
    by_file = [_replacements(Path(file)) for file in train.files]
    common = [words for words in by_file[0] if all(words in found for found in by_file)]
    roles = Roles([], [], [])
    for words in sorted(common, key=lambda words: (len(words), words)):
        group = Group(tuple(str(found[words]) for found in by_file), train.languages)
        kind = roles.validation if _role_of_word(words) == "validation" else roles.test
        if kind is roles.test or not roles.validation:
            kind.append(group)
    return roles


def _replacements(path: Path) -> dict[str, Path]:
    """The files beside a training file by the words that they have instead of `train`."""
    match = _TRAIN.search(path.name)
    if match is None or not path.is_file():
        return {}
    start, end = re.escape(path.name[: match.start()]), re.escape(path.name[match.end() :])
    words = "|".join(word for word, role in _ROLES.items() if role != "train")
    pattern = re.compile(rf"{start}((?:{words})(?:[\d._-].*)?){end}", re.IGNORECASE)
    found = ((pattern.fullmatch(file.name), file) for file in sorted(path.parent.iterdir()))
    return {match[1]: file for match, file in found if match and file.is_file()}


def _role_of_word(words: str) -> Role:
    return _ROLES[words_of(words)[0].lower()]


def names_of_test_sets(groups: Iterable[Group]) -> list[str]:
    """A distinct name for each test set: the first part of its file name, without languages."""
    names: list[str] = []
    for group in groups:
        stem = Path(group.files[0]).name.partition(".")[0]
        for _, code in languages_in(words_of(stem)):
            stem = re.sub(rf"(?<![A-Za-z]){code}(?![A-Za-z])", "", stem, flags=re.IGNORECASE)
        stem = re.sub(r"[^\w-]+", "", stem).strip("_-") or "test"
        stem = re.sub(r"([_-])[_-]+", r"\1", stem)
        name, number = stem, 2
        while name in names:
            name, number = f"{stem}-{number}", number + 1
        names.append(name)
    return names
