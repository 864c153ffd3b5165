"""Readable validation errors: the key, the values that it accepts, and the value that was given."""

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Keys = tuple[int | str, ...]  # of nested sections and lists, outermost first
_CUSTOM = ("unknown_key", "value_error")  # their messages are mtrain's own
_LONGEST = 60  # maximum number of characters of a value in a message


def explain(error: ValidationError, section: type[BaseModel]) -> tuple[Keys, str]:
    """The keys that lead to the first problem of a section, and a one-line message that names them."""
    schema = _schema_of(section)
    problems = error.errors(include_url=False)
    keys, field, description = _find(schema, problems[0]["loc"])
    others = sum(_find(schema, problem["loc"])[0] != keys for problem in problems)
    message = _message(problems[0], field, schema, description)
    message += f" (and {others} more error{'s' * (others > 1)})" if others else ""
    where = f"{'.'.join(map(str, keys))}: " if keys else ""
    if problems[0]["type"] == "unknown_key":
        keys = (*keys, problems[0]["ctx"]["key"])
    return keys, f"{where}{message}"


@cache
def _schema_of(section: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a section, which takes longer to generate than a config to validate."""
    return section.model_json_schema()


def _message(problem: ErrorDetails, field: dict[str, Any], schema: dict[str, Any], description: str) -> str:
    kind, value = problem["type"], problem["input"]
    if kind == "missing":
        return "this key is required" + (f" ({description})" if description else "")
    if problem["loc"][-1:] == ("[key]",):
        message = "names must be strings"
    elif kind in _CUSTOM:
        message = str(problem["ctx"]["error"]) if "error" in problem["ctx"] else problem["msg"]
    else:
        message = f"expected {accepted_values(field, schema)}"
        message += f" ({description})" if description else ""
    if isinstance(value, (dict, BaseModel)):
        return message
    return f"{message}; got {_shown(value)}"


def _shown(value: Any) -> str:
    """A value in YAML syntax, on one line and truncated."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _find(schema: dict[str, Any], location: Sequence[int | str]) -> tuple[Keys, dict[str, Any], str]:
    """Follow a location that pydantic reports through a JSON schema.

    Returns the parts of the location that are config keys (the others name alternative types), the schema of
    the last key, and its description up to the first semicolon.
    """
    keys: Keys = ()
    field, description = schema, ""
    for part in location:
        found = _child(field, part, schema)
        if found is not None:
            keys, field = (*keys, part), found
            description = found.get("description", "" if "$ref" in found else description).partition(";")[0]
    return keys, field, description


def _child(field: dict[str, Any], part: int | str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of a key or list index below a field."""
    if "$ref" in field:
        field = schema["$defs"][field["$ref"].rpartition("/")[2]]
    for alternative in field.get("anyOf", ()):
        if (found := _child(alternative, part, schema)) is not None:
            return found
    if isinstance(part, int) and "prefixItems" in field:
        return field["prefixItems"][part] if part < len(field["prefixItems"]) else None
    others = field.get("items" if isinstance(part, int) else "additionalProperties")
    found = field.get("properties", {}).get(part, others if part != "[key]" else None)
    return found if isinstance(found, dict) else None


def accepted_values(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """The values that a field of a JSON schema accepts, in words: "an integer from 1 to 128, or auto"."""
    if "anyOf" in field:
        return ", or ".join(accepted_values(part, schema) for part in field["anyOf"])
    if "enum" in field:
        return f"one of {', '.join(map(str, field['enum']))}"
    if "const" in field:
        return str(field["const"])
    match field.get("type"):
        case "integer" | "number":
            return _numbers(field)
        case "string":
            return "a non-empty string" if field.get("minLength") or "pattern" in field else "a string"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array" if "prefixItems" in field:
            first, *others = field["prefixItems"]
            return f"a list of {len(others) + 1}, each {accepted_values(first, schema)}"
        case "array":
            items = accepted_values(field["items"], schema)
            return f"a list, each item {items}" if "$ref" not in field["items"] else "a list of sections"
    return "keys and values"


def _numbers(field: dict[str, Any]) -> str:
    """The range of a numeric field in words."""
    integer = field["type"] == "integer"
    lowest, above = field.get("minimum"), field.get("exclusiveMinimum")
    highest, below = field.get("maximum"), field.get("exclusiveMaximum")
    if integer and below is not None:
        highest, below = below - 1, None
    name = "an integer" if integer else "a number"
    if lowest is not None and highest is not None:
        return f"{name} from {lowest} to {highest}"
    limits = {"of at least": lowest, "above": above, "at most": highest, "below": below}
    given = [f"{words} {limit}" for words, limit in limits.items() if limit is not None]
    return f"{name} {' and '.join(given)}"
