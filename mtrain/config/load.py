"""Reading a configuration: YAML, then `--set` overrides, then validation, then frozen."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from mtrain.config.schema import Config, Section
from mtrain.errors import MtrainError, UsageError

LARGEST = 2**17  # bytes of a config; to parse more would take long
_CORE_SCHEMA = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class _YamlLoader(yaml.SafeLoader):
    """PyYAML reads YAML 1.1, where `no` (Norwegian) is false, `5e-4` a string and a repeated key silently
    wins. This loader resolves scalars as YAML 1.2's core schema does, and refuses repeated keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key in (self.construct_object(key, deep=True) for key, _ in node.value):
            if key in keys:
                raise yaml.MarkedYAMLError(problem=f"'{key}' is given twice", problem_mark=node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


class _YamlDumper(yaml.SafeDumper):
    """Quotes whatever either YAML version would not read as a string, so that any reader agrees with us."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        breaks = any(c in text for c in "\x85\u2028\u2029")  # YAML 1.1 takes them for line ends
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if breaks else None)


for _tag, _pattern in _CORE_SCHEMA.items():
    for _class in (_YamlLoader, _YamlDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)
# "010" matches the int pattern; YAML 1.2 reads it as ten, PyYAML's constructor as octal eight.
_YamlLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_YamlDumper.add_representer(str, _YamlDumper.represent_text)


def parse_yaml(text: str) -> Any:
    """Parse YAML by the 1.2 core schema. Raises yaml.YAMLError, its message on one line."""
    try:
        return yaml.load(text, _YamlLoader)
    except yaml.YAMLError as error:
        raise yaml.YAMLError(" ".join(str(error).split())) from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise yaml.YAMLError(f"a value cannot be read: {type(error).__name__}: {error}") from None


def to_yaml(section: Section) -> str:
    """The section as YAML that `parse_yaml` reads back to an equal one."""
    return yaml.dump(section.model_dump(mode="json"), Dumper=_YamlDumper, sort_keys=False, allow_unicode=True)


def override(raw: Any, assignment: str) -> Any:
    """`raw` with one `section.key=value` applied; the value is YAML, list items go by index."""
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {assignment}: expected section.key=value")
    try:
        return _replaced(raw, keys, parse_yaml(text), "the config")
    except yaml.YAMLError as error:
        raise UsageError(f"--set {assignment}: the value is not YAML: {error}") from None
    except LookupError as error:
        raise UsageError(f"--set {assignment}: {error.args[0]}") from None


def _replaced(node: Any, keys: Sequence[str], value: Any, where: str) -> Any:
    """A copy of `node`, which YAML aliases may share, with another value in the place that `keys` lead to."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    below = key if where == "the config" else f"{where}.{key}"
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            raise LookupError(f"{where} is a list of {len(node)}; give an index")
        return [_replaced(item, rest, value, below) if i == int(key) else item for i, item in enumerate(node)]
    if node is None or isinstance(node, dict):
        return {**(node or {}), key: _replaced((node or {}).get(key), rest, value, below)}
    raise LookupError(f"{where} is a single value and has no key '{key}'")


def _describe(error: ValidationError) -> str:
    """The first problem in words; what else was tried at the same key (a union) is joined by "or"."""

    def key_of(location: tuple[int | str, ...]) -> str:  # without the tags of what else a value may be
        return ".".join(str(part) for part in location if not re.match(r"constrained-|literal\[", f"{part}"))

    problems = error.errors()
    key = key_of(problems[0]["loc"])
    here = [problem for problem in problems if key_of(problem["loc"]) == key]
    message = " or ".join("this key is required" if p["type"] == "missing" else p["msg"] for p in here)
    message = message.removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not isinstance(here[0]["input"], (dict, list, BaseModel)):
        message += f"; got {here[0]['input']!r}"
    if len(problems) > len(here):
        message += f" (and {len(problems) - len(here)} more)"
    return f"{key}: {message}" if key else message


SectionT = TypeVar("SectionT", bound=Section)


def validate(
    section: type[SectionT], raw: Any, origin: str, error: type[MtrainError] = UsageError
) -> SectionT:
    """Check a raw mapping against a section. Raises an `error` that names the key and what it may be."""
    try:
        return section.model_validate(raw)
    except ValidationError as found:
        raise error(f"{origin}: {_describe(found)}") from None


def read_yaml_file(path: Path) -> Any:
    """Read a YAML file. Raises UsageError if it is missing, unreadable, not YAML or too large."""
    try:
        with path.open("rb") as stream:
            contents = stream.read(LARGEST + 1)
        if len(contents) > LARGEST:
            raise UsageError(f"{path}: larger than {LARGEST:,} bytes; give a config")
        return parse_yaml(contents.decode("utf-8-sig"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such config file") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot read the config: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid YAML: {error}") from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config, merge `section.key=value` overrides, validate.

    Raises UsageError naming the key at fault, its nearest real name, and its range.
    """
    raw = read_yaml_file(Path(path))
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: expected sections such as data, model and training")
    for assignment in overrides:
        raw = override(raw, assignment)
    return validate(Config, raw, str(path))
