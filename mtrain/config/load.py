"""Loading a configuration: YAML, the configs that it extends, `--set` overrides, then validation."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import ValidationError

from mtrain.config.corpora import CORPUS_KINDS
from mtrain.config.messages import Keys, explain
from mtrain.config.schema import Config
from mtrain.config.section import Section
from mtrain.config.yaml_io import YamlError, parse_yaml, read_document
from mtrain.errors import MtrainError, UsageError

SectionT = TypeVar("SectionT", bound=Section)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config, merge it over the config that it extends, apply `section.key=value` overrides, validate.

    Raises UsageError that names the file, the line and the key of the problem.
    """
    files = _read_chain(Path(path))
    try:
        raw: Any = {}
        for file in reversed(files):
            raw = _merged(raw, file.value)
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply") from None
    for assignment in overrides:
        raw = override(raw, assignment)
    return validate(Config, raw, lambda keys: _origin(keys, files, overrides))


def validate(
    section: type[SectionT],
    raw: Any,
    origin: str | Callable[[Keys], str],
    error: type[MtrainError] = UsageError,
) -> SectionT:
    """Check a raw mapping against a section.

    `origin` begins the error message and says where the values come from: a string, or a function of the
    invalid keys. Raises an `error` that names the key and the values that it accepts.
    """
    try:
        return section.model_validate(raw)
    except ValidationError as found:
        keys, message = explain(found, section)
        raise error(f"{origin if isinstance(origin, str) else origin(keys)}: {message}") from None


def override(raw: Any, assignment: str) -> Any:
    """A copy of `raw` with one `section.key=value` applied. The value is YAML; list items have numeric keys.

    A key that gives another kind of corpus, such as `data.validation.holdout`, replaces the corpus, as in a
    config that extends another. Raises UsageError if the assignment is malformed.
    """
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {assignment}: expected section.key=value")
    if keys[0] == "extends":
        raise UsageError(f"--set {assignment}: extends works in a config file only")
    try:
        return _replaced(raw, keys, parse_yaml(text))
    except YamlError as error:
        raise UsageError(f"--set {assignment}: the value is not valid YAML: {error}") from None
    except LookupError as error:
        raise UsageError(f"--set {assignment}: {error.args[0]}") from None


def _replaced(
    node: Any, keys: Sequence[str], value: Any, where: str = "", key_path: tuple[str, ...] = ()
) -> Any:
    """A copy of `node` with another value at the end of `keys`.

    `where` is the path of `node`, and `key_path` are the keys of that path without the indices of lists. The
    nodes themselves are not changed, since YAML aliases may share them.
    """
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    below, name = f"{where}.{key}" if where else key, where or "the config"
    if not rest and _gives_another_kind(key, node, key_path):
        return {key: value}
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            raise LookupError(f"{name} is a list of {len(node)}; give an index from 0 to {len(node) - 1}")
        return [
            _replaced(item, rest, value, below, key_path) if i == int(key) else item
            for i, item in enumerate(node)
        ]
    if node is None or isinstance(node, dict):
        return {**(node or {}), key: _replaced((node or {}).get(key), rest, value, below, (*key_path, key))}
    raise LookupError(f"{name} is a single value and has no key '{key}'")


def _gives_another_kind(key: str, node: Any, key_path: tuple[str, ...]) -> bool:
    """Whether `key` gives a kind of corpus, and `node` is a corpus of another kind, or a list of corpora that
    a holdout replaces. Another key in a list may be meant for one of its items."""
    kind = _kinds_of_corpus(key_path, [key])
    if isinstance(node, list):
        return kind == {"holdout"}
    return bool(kind) and isinstance(node, dict) and kind.isdisjoint(_kinds_of_corpus(key_path, node) or kind)


# ------------------------------------------------------------------------------------------------- extends


class _ConfigFile(NamedTuple):
    """One file of a chain of configs: its values without `extends`, and its syntax tree."""

    path: Path
    value: dict[Any, Any]
    root: yaml.Node | None


def _read_chain(path: Path) -> list[_ConfigFile]:
    """A config, the config that it extends, and so on."""
    files: list[_ConfigFile] = []
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
        files.append(_ConfigFile(path, {key: item for key, item in value.items() if key != "extends"}, root))
        if "extends" not in value:
            return files
        base = value["extends"]
        where = f"{_origin(('extends',), files[-1:])}: extends: "
        if not isinstance(base, str) or not base:
            raise UsageError(f"{where}expected the path of another config, relative to this file")
        path = Path(os.path.normpath(path.parent / base))


def _merged(base: Any, value: Any, key_path: tuple[Any, ...] = ()) -> Any:
    """`value` over `base`, both at the keys `key_path`.

    Mappings are merged key by key, except for corpora of different kinds. Any other value replaces the one
    below it.
    """
    if not isinstance(base, dict) or not isinstance(value, dict):
        return value
    kinds = _kinds_of_corpus(key_path, base), _kinds_of_corpus(key_path, value)
    if all(kinds) and kinds[0] != kinds[1]:
        return value
    merged = {key: _merged(base[key], value[key], (*key_path, key)) for key in base.keys() & value.keys()}
    return base | value | merged


def _kinds_of_corpus(key_path: tuple[Any, ...], keys: Iterable[Any]) -> set[str]:
    """The keys that give the kind of the corpus at `key_path`, such as tsv. Empty if no corpus is there."""
    is_corpus = key_path in (("data", "train"), ("data", "validation")) or (
        len(key_path) == 3 and key_path[:2] == ("data", "test")
    )
    return {*keys} & CORPUS_KINDS if is_corpus else set()


def _origin(keys: Keys, files: Sequence[_ConfigFile], overrides: Sequence[str] = ()) -> str:
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
    layers: list[tuple[Path, yaml.Node | None]] = [(file.path, file.root) for file in files]
    for depth, key in enumerate(keys):
        if isinstance(key, int) and isinstance(layers[0][1], yaml.MappingNode):
            continue
        entries = [(path, *entry) for path, node in layers if (entry := _entry(node, key))]
        if not entries:
            break
        path, line = entries[0][0], f":{entries[0][1].start_mark.line + 1}"
        below: list[tuple[Path, yaml.Node | None]] = [(path, node) for path, _, node in entries]
        key_path = tuple(name for name in keys[: depth + 1] if isinstance(name, str))
        layers = _layers_that_are_merged(below, key_path) or below[:1]
    return str(path) if changed else f"{path}{line}"


def _layers_that_are_merged(
    layers: Sequence[tuple[Path, yaml.Node | None]], key_path: tuple[Any, ...]
) -> list[tuple[Path, yaml.Node | None]]:
    """The layers at the keys `key_path`, newest first, up to the one that replaces those below it."""
    merged: list[tuple[Path, yaml.Node | None]] = []
    kinds: set[str] = set()
    for path, node in layers:
        if not isinstance(node, yaml.MappingNode):
            break
        found = _kinds_of_corpus(key_path, (key.value for key, _ in node.value))
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
