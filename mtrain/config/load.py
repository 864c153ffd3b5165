"""Loading a configuration: YAML, the configs that it extends, `--set` overrides, then validation."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mtrain.config.extends import find_origin, kinds_of_corpus, merge, read_chain
from mtrain.config.messages import Keys, explain
from mtrain.config.schema import Config, ModelFolderConfig
from mtrain.config.section import Section
from mtrain.config.sections.decoding import AUTO_BATCH_TOKENS
from mtrain.config.yaml_io import YamlError, parse_yaml, read_yaml_file
from mtrain.errors import MtrainError, UsageError
from mtrain.paths import path_of

T = TypeVar("T", bound=Section)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config, merge it over the config that it extends, apply `section.key=value` overrides, validate.

    Raises UsageError that names the file, the line and the key of the problem.
    """
    files = read_chain(path_of(path))
    raw: Any = {}
    for file in reversed(files):
        raw = merge(raw, file.value)
    raw = _of_this_version(raw)
    for assignment in overrides:
        raw = override(raw, assignment)
    return validate(Config, raw, lambda keys: find_origin(keys, files, overrides))


def read_config(file: Path, error: type[MtrainError] = UsageError) -> Any:
    """The values of the config.yaml of a run or model folder. Raises an `error` if it cannot be read."""
    return _of_this_version(read_yaml_file(file, error))


def _of_this_version(raw: Any) -> Any:
    """The values of a file, with `auto` for the earlier default of `decoding.batch_tokens`."""
    decoding = raw.get("decoding") if isinstance(raw, dict) else None
    if not isinstance(decoding, dict) or decoding.get("batch_tokens") != AUTO_BATCH_TOKENS:
        return raw
    return {**raw, "decoding": {**decoding, "batch_tokens": "auto"}}


def validate(
    section: type[T], raw: Any, origin: str | Callable[[Keys], str], error: type[MtrainError] = UsageError
) -> T:
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


def with_overrides(
    config: ModelFolderConfig, overrides: Sequence[str], *prefixes: str, known: str
) -> ModelFolderConfig:
    """The settings of a model with `key=value` of `overrides`. Raises UsageError if one of them is invalid or
    begins with none of the `prefixes`, which the message calls `known`."""
    raw = config.model_dump(mode="json")
    for assignment in overrides:
        if not assignment.startswith(prefixes):
            raise UsageError(f"--set {assignment}: only {known} can be set for a trained model")
        raw = override(raw, assignment)
    return validate(ModelFolderConfig, raw, "--set")


def _replaced(node: Any, keys: list[str], value: Any, where: str = "", key_path: tuple[str, ...] = ()) -> Any:
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
        i = int(key) if key.isdecimal() and len(key) < 10 else len(node)  # see sys.set_int_max_str_digits
        if i >= len(node):
            raise LookupError(f"{name} is a list of {len(node)}; give an index from 0 to {len(node) - 1}")
        return [*node[:i], _replaced(node[i], rest, value, below, key_path), *node[i + 1 :]]
    if node is None or isinstance(node, dict):
        return {**(node or {}), key: _replaced((node or {}).get(key), rest, value, below, (*key_path, key))}
    raise LookupError(f"{name} is a single value and has no key '{key}'")


def _gives_another_kind(key: str, node: Any, key_path: tuple[str, ...]) -> bool:
    """Whether `key` gives a kind of corpus, and `node` is a corpus of another kind, or a list of corpora that
    a holdout replaces. Another key in a list may be meant for one of its items."""
    kind = kinds_of_corpus(key_path, [key])
    if isinstance(node, list):
        return kind == {"holdout"}
    return bool(kind) and isinstance(node, dict) and kind.isdisjoint(kinds_of_corpus(key_path, node) or kind)
