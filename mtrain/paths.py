"""Expands a leading `~` in the paths that users give, even if no shell has expanded it."""

import os
from pathlib import Path

from mtrain.errors import UsageError


def expand_home(path: str) -> str:
    """Replace a leading `~` or `~user` in a path with the home folder. Other paths are returned unchanged,
    such as `./~name` for a file of that name.

    Raises ValueError if the home folder is not known, unless a file of that name exists, such as `~$a.docx`.
    """
    expanded = os.path.expanduser(path)  # noqa: PTH111  (Path drops the ./ that protects a name)
    if expanded.startswith("~") and not os.path.lexists(path):
        user = path[1:].partition("/")[0]
        unknown = f"no user has the name {user}" if user else "the home folder is unknown"
        raise ValueError(f"{unknown}; for a file of that name, write ./{path}")
    return expanded


def path_of(path: str | Path) -> Path:
    """A path, with `~` expanded if it is a string. Raises UsageError if a home folder is not known."""
    try:
        return path if isinstance(path, Path) else Path(expand_home(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
