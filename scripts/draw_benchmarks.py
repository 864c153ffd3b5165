"""Draw docs/speed.svg, the bar chart of training speed, from docs/benchmarks.json."""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "benchmarks.json"
CHART = ROOT / "docs" / "speed.svg"

WIDTH, MARGIN = 860, 24  # px
LABELS = 210  # px, the column of labels
BAR, GAP = 22, 9  # px, height of a bar and the space below it
VALUES = 64  # px, room for a number behind the longest bar

# The card has its own background, so that the text is legible on light and dark pages.
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de } .bar { fill: #9aa7b5 } .highlight { fill: #1f6feb }
  text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 16px; font-weight: 600 } .panel { font-weight: 600 }
  .note { font-size: 12px; fill: #59636e }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d } .bar { fill: #656d76 } .highlight { fill: #4493f8 }
    text { fill: #f0f6fc } .note { fill: #9198a1 }
  }
"""


def chart(data: dict[str, Any]) -> str:
    """The chart as SVG: one panel of horizontal bars for each numeric column that `chart` names."""
    spec = data["chart"]
    table = data["tables"][spec["table"]]
    label = table["columns"].index(spec["label"])
    rows = {row[label]: row for row in table["rows"]}
    parts, top = [text(MARGIN, 38, spec["title"], "title")], 52
    for column, caption in spec["panels"].items():
        values = {spec["rows"][name]: rows[name][table["columns"].index(column)] for name in spec["rows"]}
        scale = (WIDTH - 2 * MARGIN - LABELS - VALUES) / max(values.values())
        top += 24
        parts.append(text(MARGIN, top, caption, "panel"))
        top += 10
        for name, value in values.items():
            kind = "highlight" if name.startswith(spec["highlight"]) else "bar"
            parts.append(text(MARGIN, top + 16, name))
            size = f'width="{value * scale:.1f}" height="{BAR}" rx="3"'
            parts.append(f'<rect class="{kind}" x="{MARGIN + LABELS}" y="{top}" {size}/>')
            parts.append(text(MARGIN + LABELS + value * scale + 8, top + 16, f"{value:,}"))
            top += BAR + GAP
    for note in spec["notes"]:
        parts.append(text(MARGIN, top + 20, note, "note"))
        top += 18
    height = top + 22
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(spec["title"])}">'
    return "\n".join([head, f"<style>{STYLE}</style>", card, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """A line of text whose baseline starts at (x, y)."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attribute}>{escape(content)}</text>'


if __name__ == "__main__":
    CHART.write_text(chart(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")
