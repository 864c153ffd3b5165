"""HTML: the text of its paragraphs, and their translations with the tags put back by word alignments."""

import re
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape, unescape

from mtrain.decoding.alignment import Alignment, word_spans

# Elements within a sentence; the tags of all others separate texts.
_NAMES = """
    a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark math nobr q ruby rp
    rt s samp small span strike strong sub sup svg time tt u var wbr
"""
_INLINE = frozenset(_NAMES.split())
# Elements without an end tag.
_VOID_NAMES = "area base br col embed hr img input link meta source track wbr"
_VOID = frozenset(_VOID_NAMES.split())
# Elements whose end tag may be omitted, and the elements whose start tags then end them; any block ends <p>.
_SIBLINGS = {"p": (), "li": ("li",), "option": ("option",), "dt": ("dt", "dd"), "dd": ("dt", "dd")}
_SIBLINGS |= {"td": ("td", "th"), "th": ("td", "th"), "tr": ("tr",)}
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
    # Elements that are kept and not read further; those that are drawn are parts of a sentence.
    r"|<(?P<kept>script|style|textarea|(?P<drawn>svg|math)(?![^>]*/>))(?=[\s/>])(?:.*?</(?P=kept)\b[^>]*>?|.*)"
    r"|<(?P<end>/?)(?P<name>[a-z][^\s/>]*)(?:[^\"'>]++|\"[^\"]*\"|'[^']*')*+(?:>|[\"'].*|\Z)"
    r"|(?P<text>[^<]+|<)",
    re.DOTALL | re.IGNORECASE,
)
_Token = re.Match[str]
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
    content: str | None = None  # the markup in it, if it is not translated
    children: list["_Element"] = field(default_factory=list)


@dataclass(eq=False)
class _Text(_Element):
    """A text and the elements in it."""

    keeps_spaces: bool = False  # in <pre>
    size: int = 0  # characters of the text without markup
    plain: list[str] = field(default_factory=list)  # its parts
    source: list[str] = field(default_factory=list)  # the parts of the text with markup

    def add(self, source: str, plain: str = "") -> None:
        """Append markup, and the text that it contains."""
        plain = plain if self.keeps_spaces else _SPACE.sub(" ", plain)
        self.source.append(source)
        self.plain.append(plain)
        self.size += len(plain)

    @cached_property
    def text(self) -> str:
        """The text without markup, once it is complete."""
        return "".join(self.plain)

    @cached_property
    def raw(self) -> str:
        """The text with markup, once it is complete."""
        return "".join(self.source)

    def has_words(self) -> bool:
        """Whether anything in the text is to be translated."""
        rest, elements = list(self.text), [*self.children]
        for element in elements:
            elements += element.children
            if element.content is not None:
                rest[element.begin : element.end] = " " * (element.end - element.begin)
        return bool("".join(rest).strip())


def _match_tags(tokens: Sequence[_Token]) -> dict[int, int]:
    """The numbers of the end tags of elements by the numbers of their start tags, and the reverse."""
    matches, open_ = dict[int, int](), defaultdict[str, list[int]](list)
    for number, token in enumerate(tokens):
        if token["end"]:
            if starts := open_[_name(token)]:
                start = starts.pop()
                matches[start], matches[number] = number, start
        elif token["name"] and not _is_single(token):
            open_[_name(token)].append(number)
    return matches


def _end_of_kept(number: int, tokens: Sequence[_Token], matches: dict[int, int]) -> int | None:
    """The number of the token that follows the element that begins with a tag, if its content is not
    translated; None for other tokens, and for elements within a sentence that do not end."""
    token, name = tokens[number], _name(tokens[number])
    if token["end"] or _is_single(token) or not (name in _KEPT_NAMES or _KEPT.search(token[0])):
        return None
    if number in matches:
        return matches[number] + 1
    if name in _INLINE:
        return None
    siblings, later = _SIBLINGS.get(name), number + 1
    while later < len(tokens) and siblings is not None:
        other = _name(tokens[later])
        if tokens[later]["end"]:
            is_end = other not in _INLINE and matches.get(later, later) < number  # of a block around this one
        else:
            is_end = (
                other in siblings if siblings else bool(other) and other not in _INLINE and other not in _VOID
            )
        if is_end:
            return later
        later = max(later, matches.get(later, 0)) + 1  # after all that is in an element
    return len(tokens)


def _name(token: _Token) -> str:
    return (token["name"] or "").lower()


def _is_single(token: _Token) -> bool:
    """Whether a tag has no content."""
    name = _name(token)
    return name in _VOID or (name in _INLINE and token[0].endswith("/>"))


class Html:
    """HTML whose `texts` are to be translated. What is between them is kept as it is."""

    def __init__(self, source: str):
        self._parts: list[str | _Text] = []
        self._open: list[_Element] = []  # the last text, and the open elements in it
        self._preformatted = 0  # number of open <pre>
        tokens = [*_TOKEN.finditer(source)]
        matches, following = _match_tags(tokens), 0
        for number, token in enumerate(tokens):
            if number < following:
                continue
            name, raw = _name(token), token[0]
            if (end := _end_of_kept(number, tokens, matches)) is not None:
                following = end
                if name in _INLINE:
                    self._add_kept(tokens[number:end])
                else:
                    self._separate("".join(each[0] for each in tokens[number:end]))
            elif (name and name not in _INLINE) or (token["kept"] and not token["drawn"]):
                change = (name == "pre") * (-1 if token["end"] else 1)
                self._preformatted = max(0, self._preformatted + change)
                self._separate(raw)
            else:
                self._add(token)
        self._texts = [part for part in self._parts if isinstance(part, _Text) and part.has_words()]

    @property
    def texts(self) -> list[str]:
        """The texts without markup; none is empty."""
        collapsed = (x.text if x.keeps_spaces else _SPACE.sub(" ", x.text) for x in self._texts)
        return [text.strip() for text in collapsed]

    def _separate(self, raw: str) -> None:
        """End the last text, and keep the markup that follows it."""
        self._parts.append(raw)
        self._open = []

    def _text(self) -> _Text:
        """The last text, or a new one."""
        if not self._open:
            self._open = [started := _Text(keeps_spaces=self._preformatted > 0)]
            self._parts.append(started)
        text = self._open[0]
        assert isinstance(text, _Text)
        return text

    def _add(self, token: _Token) -> None:
        """Add a token to the last text, or to a new one, which begins after a space."""
        name, raw = _name(token), token[0]
        if token["text"] and not self._open:
            rest = raw.lstrip(_SPACES)
            self._parts.append(raw[: len(raw) - len(rest)])
            if not (raw := rest):
                return
        text = self._text()
        begin = text.size
        text.add(raw, unescape(raw) if token["text"] else "")
        if token["end"] and name in [each.name for each in self._open[1:]]:
            while (element := self._open.pop()).name != name:
                element.end = begin
            element.end, element.close = begin, raw
        elif not token["text"]:
            opens = name and not token["end"] and not _is_single(token) and len(self._open) < _DEEPEST
            element = _Element(name, raw, begin, sys.maxsize if opens else begin)
            self._open[-1].children.append(element)
            self._open += [element] * bool(opens)

    def _add_kept(self, tokens: Sequence[_Token]) -> None:
        """Add an element whose content is not translated to the last text, or to a new one."""
        first, *inner, last = tokens
        text, content = self._text(), "".join(each[0] for each in inner)
        plain = (
            unescape(each[0]) if each["text"] else " " * (_name(each) not in _INLINE | {""}) for each in inner
        )
        element = _Element(_name(first), first[0], text.size, close=last[0], content=content)
        text.add(first[0] + content + last[0], "".join(plain))
        element.end = text.size
        self._open[-1].children.append(element)

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
        self._text, self._translation = text.text, translation
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
        if not parent.children:
            return escape(self._translation[begin:end], quote=False)
        taken = bytearray(end - begin)  # characters that are in elements
        places: list[tuple[int, int, _Element]] = []
        for element in parent.children:
            first, last = self._run(element, parent, begin, end, taken)
            if begin < first == last < end and taken[first - begin - 1]:
                free = taken.find(0, first - begin)
                first = last = begin + free if free >= 0 else end
            taken[first - begin : last - begin] = b"\1" * (last - first)
            places.append((first, last, element))
        html, done = "", begin
        for first, last, element in sorted(places, key=lambda place: place[0]):
            html += escape(self._translation[done:first], quote=False)
            at = element.begin
            before, after = self._text[max(0, at - 1) : at], self._text[at : at + 1]
            html += " " * (first == last == end and before == " " and html[-1:] not in ("", " "))
            content = self._content(element, first, last) if element.content is None else element.content
            html += element.start + content + element.close
            is_single = first == last < end and at == element.end
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
            if first < last and not any(taken[first - begin : last - begin]):
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
        if words == self._words(parent) and not any(taken):
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
