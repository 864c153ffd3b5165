"""Tables of results: drawn by rich on a terminal, and plain aligned text elsewhere."""

import io
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from mtrain.cli.console.terminal import columns_of
from mtrain.invisible_characters import escape_control_characters

if TYPE_CHECKING:
    from mtrain.evaluation.metrics import MetricScore

TableRows = Sequence[Sequence[str]]


def format_table(
    rows: TableRows, header: Sequence[str] = (), left: Sequence[int] = (0,), indent: int = 2
) -> Iterator[str]:
    """Yield the lines of a table for stdout. The columns `left` are aligned on the left and may be wrapped
    on a terminal; the others, such as numbers, are aligned on the right. A title may have two lines."""
    if not sys.stdout.isatty():
        titles = [[title.replace("\n", " ") for title in header]] if header else []
        yield from plain_table([*titles, *rows], left, indent)
        return
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD if header else None,
        show_header=bool(header),
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if header else 2, 0, 0),
    )
    for index, title in enumerate(header or [""] * len(rows[0])):
        justify: Literal["left", "right"] = "left" if index in left else "right"
        table.add_column(Text(title), justify=justify, overflow="fold", no_wrap=index not in left)
    for row in rows:
        table.add_row(*(Text(escape_control_characters(cell)) for cell in row))
    shown = io.StringIO()
    console = Console(file=shown, width=columns_of(sys.stdout), color_system=None)
    console.print(Padding(table, (0, 0, 0, indent), expand=False))
    yield from (line.rstrip() for line in shown.getvalue().splitlines())


def format_scores(scores: "Sequence[MetricScore]") -> Iterator[str]:
    """Yield the lines of scores for stdout: a table on a terminal, elsewhere as sacreBLEU formats them."""
    if not sys.stdout.isatty():
        yield from (f"  {score.detail}" for score in scores)
        return
    rows = []
    for score in scores:
        title = score.detail.partition("|")[0]
        value, _, statistics = score.detail.partition(" = ")[2].partition(" ")
        rows.append([title, value, f"{score.signature}\n{statistics}".strip()])
    beside = 2 + sum(max(len(row[column]) for row in rows) + 2 for column in (0, 1))
    for row in rows:
        row[2] = wrap_signature(row[2], beside)
    yield from format_table(rows, left=(0, 2))


def wrap_signature(text: str, beside: int) -> str:
    """A signature for stdout: on a terminal, its lines end between fields, where `beside` columns are used by
    other text."""
    if not sys.stdout.isatty():
        return text
    width = max(20, columns_of(sys.stdout) - beside)
    lines = (textwrap.wrap(line.replace("|", "| "), width) for line in text.split("\n"))
    return "\n".join(part.replace("| ", "|") for wrapped in lines for part in wrapped)


def plain_table(rows: TableRows, left: Sequence[int], indent: int = 0) -> Iterator[str]:
    """Yield the rows as lines. The columns `left` are aligned on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if column in left else ">" for column in range(len(widths))]
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        yield (" " * indent + "  ".join(cells)).rstrip()
