"""YAML 1.2: reading text and files, locating keys in them, and writing sections."""

import math
import os
import re
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mtrain.config.section import Section
from mtrain.errors import MtrainError, UsageError
from mtrain.regular_files import MAX_CONFIG_BYTES, require_plausible

MAX_NODES = 20_000  # keys and values of a document, including repetitions by aliases
MAX_DEPTH = 50
_CORE_SCHEMA = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_STYLE: dict[str, Any] = {"sort_keys": False, "allow_unicode": True}  # of what is written
_TAGS = {"sequence": ["!!seq"], "mapping": ["!!map"], "scalar": ["!!str", *map("!!{}".format, _CORE_SCHEMA)]}


class YamlError(ValueError):
    """A text is not valid YAML. `line` is the number of the offending line, starting at 1."""

    def __init__(self, problem: str, line: int):
        super().__init__(problem)
        self.line = line


class Document(NamedTuple):
    """A parsed YAML text: its value, and the syntax tree that knows the line of each key."""

    value: Any
    root: yaml.Node | None


class _YamlLoader(yaml.SafeLoader):
    """Resolves scalars by the core schema of YAML 1.2, and rejects duplicate keys, types that JSON does not
    have, and documents whose aliases make them huge or infinite.

    PyYAML itself follows YAML 1.1, where `no` (Norwegian) is false and `5e-4` is a string, and the last
    of two equal keys silently wins.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str):
        super().__init__(text)
        self._nodes = self._depth = 0  # so far, with repetitions; of the current node
        self._sizes: dict[yaml.Node, int] = {}  # the number of nodes of each complete one

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        before, mark = self._nodes, self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        _require(self._depth <= MAX_DEPTH, "nested too deeply", mark)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        _require(not is_alias or node in self._sizes, "a value contains itself", mark)
        self._nodes += self._sizes[node] if is_alias else 1
        problem = f"more than {MAX_NODES:,} values, with repetitions by aliases"
        _require(self._nodes <= MAX_NODES, problem, mark)
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        _require(tag in _TAGS[node.id], f"the tag {tag[:40]} is not supported here", mark)
        self._sizes.setdefault(node, self._nodes - before)
        return node  # type: ignore[no-any-return]

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # a ValueError for an unpaired surrogate
            return value
        except (ValueError, LookupError, AttributeError, TypeError):
            kind = node.tag.rpartition(":")[2]
            problem = f"not a valid {kind}: {node.value[:40]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            _require(isinstance(key, Hashable), "a key must be a scalar", key_node.start_mark)
            _require(key not in keys, f"'{key}' is given twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def _require(condition: bool, problem: str, mark: yaml.Mark) -> None:
    if not condition:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class _YamlDumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as another type, so that all readers agree."""


def _represent_text(dumper: yaml.representer.BaseRepresenter, text: str) -> yaml.ScalarNode:
    breaks = any(c in text for c in "\x85\u2028\u2029")  # line breaks in YAML 1.1
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if breaks else None)


for _tag, _pattern in _CORE_SCHEMA.items():
    for _class in (_YamlLoader, _YamlDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)
# YAML 1.2 reads "010" as ten, PyYAML's own constructor as octal eight.
_YamlLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_YamlDumper.add_representer(str, _represent_text)


def parse_document(text: str) -> Document:
    """Parse YAML by the 1.2 core schema. Raises YamlError."""
    try:
        root = _syntax_tree(text)
        return Document(None if root is None else _YamlLoader("").construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = line_of(mark) if mark else 1
        raise YamlError(f"{error.problem or error.context}{_quoted(text, line)}", line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"character U+{ord(text[error.position]):04X} is not allowed", line) from None


@lru_cache(maxsize=16)  # a command may read a config several times; only values are constructed anew
def _syntax_tree(text: str) -> yaml.Node | None:
    loader = _YamlLoader(text)
    try:
        return loader.get_single_node()
    except (ValueError, OverflowError):
        problem = "an escape sequence is not a Unicode character"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=loader.get_mark()) from None


def line_of(mark: yaml.Mark) -> int:
    """The number of the line of a mark, from 1. PyYAML also ends lines at U+2028, for example."""
    assert mark.buffer is not None  # because the YAML is parsed from text
    return 1 + mark.buffer.count("\n", 0, mark.pointer)


def _quoted(text: str, number: int) -> str:
    """The offending line, truncated, as the end of a message; empty if the text has a single line."""
    lines = text.split("\n")
    line = lines[number - 1].strip() if len(lines) > 1 and number <= len(lines) else ""
    return f", in: {line[:60]}" if line else ""


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, by the 1.2 core schema. Raises YamlError."""
    return parse_document(text).value


def read_document(path: Path, named_at: str = "", is_regular: bool = False) -> Document:
    """Read a YAML file. Raises UsageError if it is missing, unreadable, too large or not YAML; with
    `is_regular`, also if it is a pipe or a device.

    `named_at` begins the message if the file cannot be read: the place that names it, such as
    `child.yaml:1: extends: `.
    """
    try:
        # Opening it would block until another process writes to it. `/dev/stdin` and a shell's `<(command)`
        # are pipes without a name in the file system.
        if path.is_fifo() and os.path.exists(os.path.realpath(path)):  # noqa: PTH110
            raise UsageError(f"{named_at}{path}: a named pipe; give a regular file")
        if is_regular:
            require_plausible(path, MAX_CONFIG_BYTES)
        with path.open("rb") as stream:
            contents = stream.read(MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{named_at}{path}: no such config file") from None
    except OSError as error:
        raise UsageError(f"{named_at}{path}: cannot read the config: {error.strerror}") from None
    except ValueError as error:  # the path has a NUL character or an unpaired surrogate
        raise UsageError(f"{named_at}{path}: not a valid path: {error}") from None
    if len(contents) > MAX_CONFIG_BYTES:
        raise UsageError(f"{named_at}{path}: too large for a config: more than {MAX_CONFIG_BYTES:,} bytes")
    try:
        return parse_document(contents.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = contents.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not valid UTF-8; save the file as UTF-8") from None
    except YamlError as error:
        raise UsageError(f"{path}:{error.line}: not valid YAML: {error}") from None


def read_yaml_file(path: Path, error: type[MtrainError] = UsageError) -> Any:
    """The value of a YAML file of a run or model folder. Raises an `error` if it is missing, unreadable, too
    large, not a regular file or not YAML."""
    try:
        return read_document(path, is_regular=True).value
    except UsageError as problem:
        raise error(str(problem)) from None


def to_yaml(section: Section, exclude_unset: bool = False) -> str:
    """A section as YAML that `parse_yaml` reads back to an equal section; with `exclude_unset`, without the
    keys that were not set."""
    return dump_yaml(section.model_dump(mode="json", exclude_unset=exclude_unset))


def dump_yaml(values: dict[str, Any]) -> str:
    """A mapping of what JSON can represent as YAML that `parse_yaml` reads back."""
    return str(yaml.dump(values, Dumper=_YamlDumper, **_STYLE))


def to_yaml_line(value: Any) -> str:
    """A scalar, or a mapping of scalars, as YAML on one line."""
    text: str = yaml.dump(value, Dumper=_YamlDumper, default_flow_style=True, width=math.inf, **_STYLE)
    return text.removesuffix("\n").removesuffix("\n...")
