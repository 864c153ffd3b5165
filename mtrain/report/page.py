"""The frame and the style of self-contained HTML pages: light and dark, for screens of any width."""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from mtrain.config.language_names import find_language
from mtrain.evaluation.differences import Span

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c2128; --muted: #57606a; --line: #d0d7de;
  --panel: #f6f8fa; --link: #0550ae; --added: #c4f0ce; --added-line: #116329; --removed: #ffdcd7;
  --removed-line: #a40e26; --heat: #79b8ff; }
@media (prefers-color-scheme: dark) { :root { --page: #15191f; --text: #e6edf3; --muted: #9aa5b1;
  --line: #3b434d; --panel: #1e242c; --link: #79b8ff; --added: #123d22; --added-line: #56d364;
  --removed: #561b1e; --removed-line: #ff9492; --heat: #1f5fb8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; margin-top: 2.5rem; } h3 { font-size: 1.1rem; }
h1, h2, h3 { line-height: 1.25; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -999rem; } .skip:focus { left: 1rem; background: var(--page); }
.muted { color: var(--muted); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: start; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: end; white-space: nowrap; }
th:first-child, td:first-child { text-align: start; padding-left: 0; }
thead th { color: var(--muted); font-weight: 600; }
th[scope=row] { white-space: normal; min-width: 5rem; overflow-wrap: break-word; }
@media (max-width: 44rem) { th, td { padding: .35rem .25rem; font-size: .8rem; white-space: normal; }
  thead th, td { overflow-wrap: normal; } }
del, ins { border-radius: 3px; padding: 0 .1em; text-underline-offset: .2em; text-decoration-thickness: 2px; }
fieldset { border: 1px solid var(--line); border-radius: 8px; display: inline-flex; flex-wrap: wrap;
  gap: .3rem 1.2rem; margin: .5rem 0; }
label { min-height: 1.5rem; }
mark { background: var(--removed); color: inherit; border-radius: 3px; padding: 0 .1em;
  text-decoration: underline dotted var(--removed-line); text-underline-offset: .2em; }
summary { cursor: pointer; min-height: 1.5rem; }
del { background: var(--removed); text-decoration: underline dotted var(--removed-line); }
ins { background: var(--added); text-decoration: underline solid var(--added-line); }
"""


def html_page(title: str, body: str, style: str = "") -> str:
    """A complete page. `title` is plain text; `body` is HTML, whose main part is in `<main id="main">`. What
    is not valid in UTF-8, as the bytes of some file names, becomes a question mark."""
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
{body}
</body>
</html>
"""
    return page.encode("utf-8", errors="replace").decode("utf-8")


def asset(name: str) -> str:
    """The text of a style sheet or script that a page embeds."""
    return files("mtrain.report").joinpath("assets", name).read_text(encoding="utf-8")


def json_script(value: object, id_: str | None = None) -> str:
    """A script element with data for the scripts of a page."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    attribute = f' id="{id_}"' if id_ else ""
    return f'<script type="application/json"{attribute}>{text}</script>'


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text, which scrolls by itself if it is wider than the screen. The first cell of a row
    is its heading."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    lines = [_row(first, cells) for first, *cells in rows]
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def text_attributes(language: object) -> str:
    """The attributes of an element with a sentence in a language, whose code may be unknown: fonts and screen
    readers depend on it."""
    if not isinstance(language, str) or not language:
        return 'dir="auto"'
    return f'dir="auto" lang="{escape(find_language(language) or language.replace("_", "-"))}"'


def html_differences(spans: Iterable[Span], element: str) -> str:
    """A sentence whose changed words are in `del` or `ins` elements."""
    return "".join(
        f"<{element}>{escape(text)}</{element}>" if changed else escape(text) for text, changed in spans
    )


def _row(first: str, cells: Iterable[str]) -> str:
    others = "".join(f"<td>{_breakable(cell, '_/')}</td>" for cell in cells)
    return f'<tr><th scope="row">{_breakable(first, "._/")}</th>{others}</tr>'


def _breakable(text: str, after: str) -> str:
    """Text that may be broken after some characters, as keys and paths on a narrow screen."""
    return re.sub(rf"([{after}])(?=\w)", r"\1<wbr>", escape(text))
