"""HTML: the text of its paragraphs, and their translations with the tags put back by word alignments."""

import re
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape, unescape

from mtrain.decoding.alignment import Alignment, word_spans

# Elements within a sentence; the tags of all others separate texts.
_NAMES = """
    a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark nobr q ruby rp rt s
    samp small span strike strong sub sup time tt u var wbr
"""
_INLINE = frozenset(_NAMES.split())
# Elements without an end tag.
_VOID_NAMES = "area base br col embed hr img input link meta source track wbr"
_VOID = frozenset(_VOID_NAMES.split())
# Elements whose content is not translated, by their names or attributes.
_KEPT_NAMES = ("code", "kbd", "samp", "var")
_KEPT = re.compile(
    r"\btranslate\s*=\s*[\"']?no\b|\bclass\s*=\s*(?:[\"'][^\"']*)?\bnotranslate\b", re.IGNORECASE
)
_DEEPEST = 50  # elements in each other; tags that are deeper count as single ones
# As in browsers, comments, scripts, tags and quotes that do not end extend to the end of the document. No
# alternative fails after it has read far, so the time is linear, unlike that of `html.parser`.
_TOKEN = re.compile(
    r"(?P<comment><!--(?:.*?-->|.*)|<(?:[!?]|/(?![a-z]))[^>]*>?)"
    r"|<(?P<kept>script|style|textarea)\b(?:.*?</(?P=kept)\b[^>]*>?|.*)"  # whose content is not translated
    r"|<(?P<end>/?)(?P<name>[a-z][^\s/>]*)(?:[^\"'>]++|\"[^\"]*\"|'[^']*')*+(?:>|[\"'].*|\Z)"
    r"|(?P<text>[^<]+|<)",
    re.DOTALL | re.IGNORECASE,
)
_SPACES = " \t\r\n\f"
_SPACE = re.compile(f"[{_SPACES}]+")
_BEFORE, _AFTER = re.compile(r"[^\w\s]*"), re.compile(r"[^\w\s]*\Z")  # punctuation around a word


@dataclass(eq=False)
class _Element:
    """Markup within a text: an element or, if nothing can be in it, a tag or comment."""

    name: str = ""
    start: str = ""  # the markup as it is in the source
    begin: int = 0  # in the text without markup
    end: int = sys.maxsize  # also of an element that is not closed
    close: str = ""
    begin_raw: int = 0  # of its content in `raw` of the text
    inner: tuple[int, int] | None = None  # where the content is in `raw` of the text, if it is kept as it is
    children: list["_Element"] = field(default_factory=list)


@dataclass(eq=False)
class _Text(_Element):
    """A text and the elements in it."""

    text: str = ""  # without markup
    raw: str = ""  # with markup
    keeps_spaces: bool = False  # in <pre>

    def has_words(self) -> bool:
        """Whether anything in the text is to be translated."""
        rest, elements = list(self.text), [*self.children]
        for element in elements:
            elements += element.children
            if element.inner:
                rest[element.begin : element.end] = " " * (element.end - element.begin)
        return bool("".join(rest).strip())


class Html:
    """HTML whose `texts` are to be translated. What is between them is kept as it is."""

    def __init__(self, source: str):
        self._parts: list[str | _Text] = []
        self._open: list[_Element] = []  # the last text, and the open elements in it
        preformatted = kept = 0  # numbers of open <pre>, and of open elements in one that is kept
        kept_name = ""
        for token in _TOKEN.finditer(source):
            name, raw = (token["name"] or "").lower(), token[0]
            starts_block = name and not token["end"] and name not in _INLINE and name not in _VOID
            if kept or (starts_block and _KEPT.search(raw)):
                kept_name = kept_name if kept else name
                kept += (name == kept_name) * (-1 if token["end"] else 1)
                self._parts.append(raw)
                self._open = []
            elif token["kept"] or (name and name not in _INLINE):
                preformatted = max(0, preformatted + (name == "pre") * (-1 if token["end"] else 1))
                self._parts.append(raw)
                self._open = []
            else:
                is_single = token["comment"] or name in _VOID or raw.endswith("/>")
                kind = (
                    "text" if token["text"] else "single" if is_single else "end" if token["end"] else "start"
                )
                self._add(kind, name, raw, preformatted > 0)
        self._texts = [part for part in self._parts if isinstance(part, _Text) and part.has_words()]

    @property
    def texts(self) -> list[str]:
        """The texts without markup; none is empty."""
        collapsed = (x.text if x.keeps_spaces else _SPACE.sub(" ", x.text) for x in self._texts)
        return [text.strip() for text in collapsed]

    def _add(self, kind: str, name: str, raw: str, keeps_spaces: bool) -> None:
        """Add a token to the last text, or to a new one, which begins after a space."""
        if not self._open:
            rest = raw.lstrip(_SPACES) if kind == "text" else raw
            self._parts.append(raw[: len(raw) - len(rest)])
            if not (raw := rest):
                return
            self._open = [started := _Text(keeps_spaces=keeps_spaces)]
            self._parts.append(started)
        text = self._open[0]
        assert isinstance(text, _Text)
        text.raw += raw
        if kind == "text":
            plain = unescape(raw)
            text.text += plain if keeps_spaces else _SPACE.sub(" ", plain)
        elif kind == "end" and name in [each.name for each in self._open[1:]]:
            while (element := self._open.pop()).name != name:
                element.end = len(text.text)
            element.end, element.close = len(text.text), raw
            if name in _KEPT_NAMES or _KEPT.search(element.start):
                element.inner = element.begin_raw, len(text.raw) - len(raw)
        else:
            begin, opens = len(text.text), kind == "start" and len(self._open) < _DEEPEST
            element = _Element(name, raw, begin, sys.maxsize if opens else begin, begin_raw=len(text.raw))
            self._open[-1].children.append(element)
            self._open += [element] * opens

    def with_translations(self, translations: Sequence[tuple[str, Alignment]]) -> str:
        """The HTML with the translations of `texts` in place of them. Each comes with the alignment of its
        words. Every tag and comment of the source occurs exactly once."""
        found = dict(zip(map(id, self._texts), translations, strict=True))
        html = ""
        for part in self._parts:
            if isinstance(part, _Text) and id(part) in found:
                space = part.raw[len(part.raw.rstrip(_SPACES)) :]
                html += _Placement(part, *found[id(part)]).html + space
            else:
                html += part.raw if isinstance(part, _Text) else part
        return html


class _Placement:
    """Places the elements of a text in its translation. An element is put around the longest run of target
    words that are aligned with its source words; unaligned words may lie within the run."""

    def __init__(self, text: _Text, translation: str, alignment: Alignment):
        self._text, self._raw, self._translation = text.text, text.raw, translation
        source, self._target = word_spans(text.text), word_spans(translation)
        self._begins, self._ends = ([span[side] for span in source] for side in (0, 1))
        self._aligned: dict[int, list[int]] = defaultdict(list)  # target words of each source word
        for i, j in alignment:
            self._aligned[i].append(j)
        self._unaligned = set(range(len(self._target))) - {j for _, j in alignment}
        self.html = self._content(text, 0, len(translation))  # the translation with all elements

    def _words(self, element: _Element) -> range:
        """The source words that an element contains, also in part."""
        return range(bisect_right(self._ends, element.begin), bisect_left(self._begins, element.end))

    def _content(self, parent: _Element, begin: int, end: int) -> str:
        """A part of the translation as HTML, with the elements that are in it."""
        taken = bytearray(len(self._translation))  # characters that are in elements
        places: list[tuple[int, int, _Element]] = []
        for element in parent.children:
            first, last = self._run(element, parent, begin, end, taken)
            if begin < first == last < end and taken[first - 1]:
                free = taken.find(0, first, end)
                first = last = free if free >= 0 else end
            taken[first:last] = b"\1" * (last - first)
            places.append((first, last, element))
        html, done = "", begin
        for first, last, element in sorted(places, key=lambda place: place[0]):
            html += escape(self._translation[done:first], quote=False)
            before, after = self._text[: element.begin][-1:], self._text[element.begin :][:1]
            html += " " * (first == last == end and before == " " and html[-1:] not in ("", " "))
            inner = element.inner
            content = self._raw[slice(*inner)] if inner else self._content(element, first, last)
            html += element.start + content + element.close
            is_single = first == last < end and element.begin == element.end
            html += " " * (is_single and after == " " and self._translation[last] != " ")
            done = max(done, last)
        return html + escape(self._translation[done:end], quote=False)

    def _run(
        self, element: _Element, parent: _Element, begin: int, end: int, taken: bytearray
    ) -> tuple[int, int]:
        """The characters of the translation that an element contains, between `begin` and `end`. If there are
        none, both numbers are the position of the element."""
        words, runs = self._words(element), list[list[int]]()
        for i in sorted({i for word in words for i in self._aligned[word]}):
            first, last = max(begin, self._target[i][0]), min(end, self._target[i][1])
            if first < last and not any(taken[first:last]):
                if runs and self._unaligned.issuperset(range(runs[-1][-1] + 1, i)):
                    runs[-1].append(i)
                else:
                    runs.append([i])
        if not runs:
            at = self._position(element, parent, begin, end)
            return at, at
        run = max(runs, key=len)
        first, last = max(begin, self._target[run[0]][0]), min(end, self._target[run[-1]][1])
        cut_before, cut_after = (self._begins[words[0]] < element.begin, self._ends[words[-1]] > element.end)
        same = self._text[element.begin : element.end].strip()  # such as the number of a footnote
        if (cut_before or cut_after) and (at := self._translation.find(same, first, last)) >= 0:
            return at, at + len(same)
        if words == self._words(parent) and not any(taken[begin:end]):
            first, last = begin, end
        if cut_before:
            first += len(_BEFORE.findall(self._translation[first:last])[0])
        if cut_after:
            last -= len(_AFTER.findall(self._translation[first:last])[0])
        return first, max(first, last)

    def _position(self, element: _Element, parent: _Element, begin: int, end: int) -> int:
        """Where an element without words is placed: before the translation of the word after it or, if it
        follows a word without a space, after the translation of this word."""
        words = self._words(parent)
        word = max(bisect_right(self._ends, element.begin), self._words(element).stop)
        if word <= words.start or word >= words.stop:
            return begin if word <= words.start and words else end
        after = min((self._target[i][0] for i in self._aligned[word]), default=end)
        before = max((self._target[i][1] for i in self._aligned[word - 1]), default=after)
        return min(max(begin, before if self._ends[word - 1] == element.begin else after), end)
