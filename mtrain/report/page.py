"""The frame and the style of self-contained HTML pages: light and dark, for screens of any width."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

import regex  # supports Unicode properties

from mtrain.config.language_names import find_language
from mtrain.config.languages import is_right_to_left
from mtrain.evaluation.differences import mark_differences

_RIGHT_TO_LEFT = regex.compile(r"[\p{Bidi_Class=R}\p{Bidi_Class=AL}]")
_LEFT_TO_RIGHT = regex.compile(r"\p{Bidi_Class=L}")


def html_page(title: str, body: str, styles: Iterable[str] = (), scripts: Iterable[str] = ()) -> str:
    """A complete page. `title` is plain text; `body` is HTML, whose main part is in `<main id="main">`;
    `styles` and `scripts` are files in assets/. What is not valid in UTF-8, as the bytes of some file names,
    becomes a question mark."""
    css = "".join(_asset(name) for name in ("page.css", *styles))
    js = "".join(f"<script>{_asset(name)}</script>\n" for name in scripts)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{css}</style>
<noscript><style>[data-chart], [data-attention] {{ display: none; }}</style></noscript>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<noscript><p>Charts and attention maps need scripts: open this file in a browser.</p></noscript>
{body}
{js}</body>
</html>
"""
    return page.encode("utf-8", errors="replace").decode("utf-8")


def _asset(name: str) -> str:
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


def html_radios(legend: str, name: str, choices: Mapping[str, str], checked: str) -> str:
    """Radio buttons, of which one is `checked`. `choices` has the text of each value."""
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{" checked" * (value == checked)}> '
        f"{text}</label>"
        for value, text in choices.items()
    )
    return f"<fieldset><legend>{legend}</legend>{buttons}</fieldset>"


def text_attributes(text: str, language: object = None) -> str:
    """The attributes of an element with a sentence in a language, whose code may be unknown: its direction,
    and the language, on which fonts and screen readers depend. The first letter does not tell the direction:
    an Arabic sentence may begin with a Latin name."""
    known = language if isinstance(language, str) else ""
    right = len(_RIGHT_TO_LEFT.findall(text))
    left = 0 if is_right_to_left(known) else len(_LEFT_TO_RIGHT.findall(text))
    direction = "rtl" if right > left else "ltr"
    code = find_language(known) or known.replace("_", "-")
    return f'dir="{direction}" lang="{escape(code)}"' if code else f'dir="{direction}"'


def html_labeled(label: str, text: str, language: object = None, html: str = "") -> str:
    """A sentence under a label, which are both plain text. `html` is what is shown of the sentence, by
    default all of it."""
    return (
        f'<p class="label">{escape(label)}</p><p {text_attributes(text, language)}>{html or escape(text)}</p>'
    )


def html_differences(text: str, other: str, element: str) -> str:
    """A text whose words that another text lacks are in elements such as `del` or `ins`."""
    spans = [(escape(span), changed) for span, changed in mark_differences(text, other)]
    return "".join(f"<{element}>{span}</{element}>" if changed else span for span, changed in spans)


def _row(first: str, cells: Iterable[str]) -> str:
    others = "".join(f"<td>{_breakable(cell, '_/')}</td>" for cell in cells)
    return f'<tr><th scope="row">{_breakable(first, "._/")}</th>{others}</tr>'


def _breakable(text: str, after: str) -> str:
    """Text that may be broken after some characters, as keys and paths on a narrow screen."""
    return re.sub(rf"([{after}])(?=\w)", r"\1<wbr>", escape(text))
