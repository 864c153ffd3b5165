"""Plain tables: the recipe that `model.preset: auto` chose, and the report of `mtrain plan`."""

from collections.abc import Iterator, Sequence


def align(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Rows of a name, a value and a remark as lines. Values are right-aligned."""
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, value, remark in rows:
        yield f"{name:<{widths[0]}}  {value:>{widths[1]}}  {remark}".rstrip()
