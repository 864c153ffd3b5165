"""Configs that extend one another: reading them, merging them, and where a value comes from."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mtrain.config.messages import Keys
from mtrain.config.sections.corpora import CORPUS_KINDS
from mtrain.config.yaml_io import line_of, read_document
from mtrain.errors import UsageError
from mtrain.paths import expand_home

_Layer = tuple[Path, yaml.Node | None]  # a file of a chain of configs, and a node in it


class ConfigFile(NamedTuple):
    """One file of a chain of configs: its values without `extends`, and its syntax tree."""

    path: Path
    value: dict[Any, Any]
    root: yaml.Node | None


def read_chain(path: Path) -> list[ConfigFile]:
    """A config, the config that it extends, and so on."""
    files: list[ConfigFile] = []
    seen: list[str] = []
    where = ""  # location of the key that names `path`
    while True:
        value, root = read_document(path, where)
        name = os.path.realpath(path)
        if name in seen:
            if name == seen[-1]:
                raise UsageError(f"{where}{path}: a config cannot extend itself")
            raise UsageError(f"{where}{path}: circular extends: it extends {files[-1].path}")
        seen.append(name)
        if not isinstance(value, dict):
            problem = f"{where}{path}: expected sections such as data, model and training"
            raise UsageError(problem if where else f"{problem}; `mtrain init` writes a config for text files")
        files.append(ConfigFile(path, {key: item for key, item in value.items() if key != "extends"}, root))
        if "extends" not in value:
            return files
        base = value["extends"]
        where = f"{find_origin(('extends',), files[-1:])}: extends: "
        if not isinstance(base, str) or not base:
            raise UsageError(f"{where}expected the path of another config, relative to this file")
        try:
            path = Path(os.path.normpath(path.parent / expand_home(base)))
        except ValueError as error:
            raise UsageError(f"{where}{base}: {error}") from None


def merge(base: Any, value: Any, key_path: tuple[Any, ...] = ()) -> Any:
    """`value` over `base`, both at the keys `key_path`.

    Mappings are merged key by key, except for corpora of different kinds. Any other value replaces the one
    below it.
    """
    if not isinstance(base, dict) or not isinstance(value, dict):
        return value
    kinds = kinds_of_corpus(key_path, base), kinds_of_corpus(key_path, value)
    if all(kinds) and kinds[0] != kinds[1]:
        return value
    merged = {key: merge(base[key], value[key], (*key_path, key)) for key in base.keys() & value.keys()}
    return base | value | merged


def kinds_of_corpus(key_path: tuple[Any, ...], keys: Iterable[Any]) -> set[str]:
    """The keys that give the kind of the corpus at `key_path`, such as tsv. Empty if no corpus is there."""
    is_test_set = len(key_path) == 3 and key_path[:2] == ("data", "test")
    is_corpus = is_test_set or key_path in (("data", "train"), ("data", "validation"))
    return {*keys} & CORPUS_KINDS if is_corpus else set()


def find_origin(keys: Keys, files: Sequence[ConfigFile], overrides: Sequence[str] = ()) -> str:
    """Where the value at `keys` comes from: FILE:LINE, FILE if there is no single line, or --set."""
    names = [key for key in keys if isinstance(key, str)]
    changed = False  # whether an override replaces a part of the value
    for assignment in overrides:
        given = assignment.partition("=")[0].strip().split(".")
        # `names` has no list indices: a single corpus may be written without a list.
        for name in ([str(key) for key in keys], names):
            if given == name[: len(given)]:
                return "--set"
            changed = changed or name == given[: len(name)]
    path, line = files[0].path, ""
    layers: list[_Layer] = [(file.path, file.root) for file in files]
    for depth, key in enumerate(keys):
        if isinstance(key, int) and isinstance(layers[0][1], yaml.MappingNode):
            continue
        entries = [(path, *entry) for path, node in layers if (entry := _entry(node, key))]
        if not entries:
            break
        path, line = entries[0][0], f":{line_of(entries[0][1].start_mark)}"
        below: list[_Layer] = [(path, node) for path, _, node in entries]
        key_path = tuple(name for name in keys[: depth + 1] if isinstance(name, str))
        layers = _layers_that_are_merged(below, key_path) or below[:1]
    return str(path) if changed else f"{path}{line}"


def _layers_that_are_merged(layers: Sequence[_Layer], key_path: tuple[Any, ...]) -> list[_Layer]:
    """The layers at the keys `key_path`, newest first, up to the one that replaces those below it."""
    merged: list[_Layer] = []
    kinds: set[str] = set()
    for path, node in layers:
        if not isinstance(node, yaml.MappingNode):
            break
        found = kinds_of_corpus(key_path, (key.value for key, _ in node.value))
        if kinds and found and found != kinds:
            break
        kinds = kinds or found
        merged.append((path, node))
    return merged


def _entry(node: yaml.Node | None, key: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    """The nodes of a key and of its value."""
    if isinstance(node, yaml.MappingNode):
        return next((pair for pair in node.value if pair[0].value == str(key)), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key], node.value[key]
    return None
