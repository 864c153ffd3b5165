"""HTML: the text of its paragraphs, and their translations with the tags put back by word alignments."""

import re
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from itertools import groupby

from mtrain.decoding.alignment import Alignment, word_spans

# Elements that start a new line, and controls. Their tags separate texts; all others, also elements that HTML
# does not know, are within a sentence.
_ENDING_P = """
    address article aside blockquote center details dialog dir div dl dd dt fieldset figcaption figure footer
    form h1 h2 h3 h4 h5 h6 header hgroup li listing main menu nav ol p plaintext pre search section summary
    table ul xmp
"""
_OTHER_BLOCKS = """
    audio base body br button canvas caption col colgroup frame frameset head hr html iframe legend link meta
    noscript object optgroup option script select style tbody td template textarea tfoot th thead title tr
    video
"""
_BLOCKS = frozenset([*_ENDING_P.split(), *_OTHER_BLOCKS.split()])
# Elements without an end tag.
_VOID_NAMES = "area base br col embed hr img input link meta source track wbr"
_VOID = frozenset(["", *_VOID_NAMES.split()])
# Blocks whose end tag may be omitted, and the blocks (as regular expressions) whose start tags then end them.
_ENDED_BY = {"p": "|".join(_ENDING_P.split()), "li": "li", "option": "option|optgroup"}
_ENDED_BY |= dict.fromkeys(("dt", "dd"), "dt|dd")
_ENDED_BY |= dict.fromkeys(("td", "th"), "td|th|tr|tbody|tfoot") | {"tr": "tr|tbody|tfoot"}
_ENDED_BY |= dict.fromkeys(("thead", "tbody"), "tbody|tfoot") | {"optgroup": "optgroup"}
_KEPT_NAMES = ("code", "kbd", "samp", "var")  # elements whose content is not translated
_ATTRIBUTE = re.compile(r"""[\s/]([^\s/>="']+)(?:\s*=\s*("[^"]*"|'[^']*'|[^\s>"']*))?""")
_DEEPEST = 50  # elements in each other; tags that are deeper count as single ones
# As in browsers, comments, scripts, tags and quotes that do not end extend to the end of the document. No
# alternative fails after it has read far, so the time is linear, unlike that of `html.parser`.
_TOKEN = re.compile(
    r"<!--(?:-?>|.*?--!?>|.*)|<(?:[!?]|/(?![a-z]))[^>]*>?"
    # Elements that are kept and not read further.
    r"|<(?P<kept>script|style|textarea|(?:svg|math)(?![^>]*/>))(?=[\s/>])(?:.*?</(?P=kept)\b[^>]*>?|.*)"
    # A quote begins a value only after "=".
    r"|<(?P<end>/?)(?P<name>[a-z][^\s/>]*)(?:[^=>]++|=\s*+(?:\"[^\"]*(?:\"|\Z)|'[^']*(?:'|\Z))|=)*+(?:>|\Z)"
    r"|(?P<text>[^<]+|<)",
    re.DOTALL | re.IGNORECASE,
)
_Token = re.Match[str]
_SPACES = " \t\r\n\f"
_SPACE = re.compile(f"[{_SPACES}]+")
# A character reference, white space, or other text. Of references to spaces, only &nbsp and numbers need no
# semicolon.
_PIECE = re.compile(r"&nbsp;?|&#(?:x[0-9a-f]+|[0-9]+);?|&\w+;|\s+|[^\s&]+|&", re.IGNORECASE)
_VALUE_ENDS = re.compile(r"[\s\"']")
_LONG_NUMBER = re.compile("&#[0-9]{1000,};?")
_PUNCTUATION = re.compile(r"[^\w\s]")
_INDENTED = re.compile(r"\n[ \t]{2,}\S")
_TAG_BEGIN = re.compile("<(?=[a-z/!?])", re.IGNORECASE)


def _name(token: _Token) -> str:
    return (token["name"] or token["kept"] or "").lower()


def _is_block(token: _Token) -> bool:
    """Whether a tag, or an element that is kept, separates texts."""
    return _name(token) in _BLOCKS


def _is_single(token: _Token) -> bool:
    """Whether a token has no end tag: a void or self-closing tag, a comment, text, or a whole element."""
    name = _name(token)
    if token["kept"] or name in _VOID:
        return True
    # A slash at the end of a value without quotes belongs to the value.
    return name not in _BLOCKS and token[0].endswith("/>") and "=" not in _VALUE_ENDS.split(token[0])[-1]


def _is_kept(token: _Token) -> bool:
    """Whether the content of an element is not translated, by its start tag."""
    attributes = {name: value.strip("\"'") for name, value in _ATTRIBUTE.findall(token[0].lower())}
    classes = attributes.get("class", "").split()
    return _name(token) in _KEPT_NAMES or attributes.get("translate") == "no" or "notranslate" in classes


def _unescape(text: str) -> str:
    """A text without character references. Numbers that Python could not convert are no characters."""
    return unescape(_LONG_NUMBER.sub("\ufffd", text))


def _plain(token: _Token) -> str:
    """What a token is in the text without markup: text itself, a space for a block, otherwise nothing."""
    return _unescape(token[0]) if token["text"] else " " * _is_block(token)


def _span(text: str) -> tuple[int, int]:
    """Where a text begins after white space, including references such as &nbsp;, and where it ends before
    such."""
    filled = [piece for piece in _PIECE.finditer(text) if not _unescape(piece[0]).isspace()]
    return (filled[0].start(), filled[-1].end()) if filled else (len(text), 0)


def _ends(tokens: Sequence[_Token]) -> dict[int, int]:
    """By the number of each start tag, the number of the token after its element. Elements within a sentence
    that have no end tag are left out."""
    ends: dict[int, int] = {}
    open_: dict[str, list[int]] = defaultdict(list)  # start tags without an end tag so far, by name
    blocks: list[int] = []  # those of blocks

    def end_block(number: int) -> None:
        """End the last open block before a token."""
        block = blocks.pop()
        ends[open_[_name(tokens[block])].pop()] = number

    for number, token in enumerate(tokens):
        name = _name(token)
        if token["end"]:
            if not open_[name]:
                continue
            if _is_block(token):
                while blocks[-1] > open_[name][-1]:
                    end_block(number)
                end_block(number + 1)
            else:
                ends[open_[name].pop()] = number + 1
        elif not _is_single(token):
            if _is_block(token):
                while blocks and re.fullmatch(_ENDED_BY.get(_name(tokens[blocks[-1]]), ""), name):
                    end_block(number)
                blocks.append(number)
                ends[number] = len(tokens)
            open_[name].append(number)
    return ends


def _units(source: str) -> Iterator[tuple[list[_Token], bool]]:
    """Yield the tokens of HTML in groups, and whether each is within <pre>. Each element whose content is not
    translated is one group, every other token is a group of its own."""
    tokens = [*_TOKEN.finditer(source)]
    ends, number, end_of_pre = _ends(tokens), 0, 0
    while number < len(tokens):
        token, end = tokens[number], number + 1
        if number in ends and _is_kept(token):
            end = ends[number]
        elif _name(token) == "pre":
            end_of_pre = max(end_of_pre, ends.get(number, 0))
        yield tokens[number:end], number < end_of_pre
        number = end


@dataclass(eq=False)
class _Element:
    """Markup within a text: an element, a tag without content, or a comment."""

    name: str
    start: str  # the markup as it is in the source, with the content if that is not translated
    begin: int  # in the text without markup
    end: int
    is_kept: bool = False
    close: str = ""
    children: list["_Element"] = field(default_factory=list)


class _Text:
    """A text without markup, and the elements in it."""

    def __init__(self, units: Sequence[list[_Token]], keeps_spaces: bool):
        first, last = units[0][0], units[-1][-1]
        self.begin = first.start() + _span(first["text"] or "")[0]  # in the source
        self.end = last.start() + (_span(last["text"])[1] if last["text"] else len(last[0]))
        self.root = _Element("", "", 0, sys.maxsize)
        parts, around, size, open_ = list[str](), "", 0, [self.root]
        for unit in units:
            token, name = unit[0], _name(unit[0])
            plain = "".join(map(_plain, unit))
            plain = plain if parts else plain.lstrip()  # `self.begin` is after spaces
            plain = plain.rstrip() if token is last and token["text"] else plain  # and `self.end` before them
            around += "-" if len(unit) > 1 else plain  # elements that are kept have their spaces
            parts.append(plain if keeps_spaces else _SPACE.sub(" ", plain))
            begin, size = size, size + len(parts[-1])
            if token["end"] and name in [each.name for each in open_[1:]]:
                while (element := open_.pop()).name != name:
                    element.end = begin
                element.end, element.close = begin, token[0]
            elif not token["text"]:
                is_kept = len(unit) > 1
                element = _Element(name, "".join(each[0] for each in unit), begin, size, is_kept)
                open_[-1].children.append(element)
                if not (is_kept or token["end"] or _is_single(token)) and len(open_) < _DEEPEST:
                    element.end = sys.maxsize  # unless it is closed
                    open_.append(element)
        self.text = "".join(parts)
        # What translations lack: the white space at the ends of the text that is within elements.
        spaces = around.partition(around.strip())[::2]
        self.spaces = spaces if keeps_spaces else tuple(each.strip(_SPACES) for each in spaces)


class Html:
    """HTML whose `texts` are to be translated. What is between them is kept as it is. HTML without any markup
    is plain text, also for the clients that send it: unless lines are indented, as in the source of a page,
    they are kept, and & is escaped only where it would begin a character reference."""

    def __init__(self, source: str):
        self.texts: list[str] = []  # without markup; none is empty
        self._source = source
        self._texts: list[_Text] = []
        all_units = [*_units(source)]
        has_markup = not all(unit[0]["text"] for unit, _ in all_units) or _unescape(source) != source
        self._is_plain = not has_markup and not _INDENTED.search(source)
        for is_between, group in groupby(all_units, lambda each: _is_block(each[0][0])):
            units, in_pre = zip(*group, strict=True)
            if not is_between and any(token["text"] and _plain(token).strip() for token, *_ in units):
                keeps_spaces = self._is_plain or in_pre[0]
                self._texts.append(text := _Text(units, keeps_spaces))
                self.texts.append((text.text if keeps_spaces else _SPACE.sub(" ", text.text)).strip())

    def with_translations(self, translations: Sequence[tuple[str, Alignment]]) -> str:
        """The HTML with the translations of `texts` in place of them. Each comes with the alignment of its
        words. Every tag and comment of the source occurs exactly once."""
        html, done = "", 0
        for text, (translation, alignment) in zip(self._texts, translations, strict=True):
            translation = translation.join(text.spaces)
            if self._is_plain and _unescape(translation) == translation:
                translated = _TAG_BEGIN.sub("&lt;", translation)
            else:
                translated = _Placement(text, translation, alignment).html
            html += self._source[done : text.begin] + translated
            done = text.end
        return html + self._source[done:]


class _Placement:
    """Places the elements of a text in its translation. An element is put around the longest run of target
    words that are aligned with its source words; unaligned words may lie within the run."""

    def __init__(self, text: _Text, translation: str, alignment: Alignment):
        self._text, self._translation = text.text, translation
        source, target = word_spans(text.text), word_spans(translation)
        self._begins, self._ends = ([span[side] for span in source] for side in (0, 1))
        aligned = sorted({j for _, j in alignment})
        self._spans = [target[j] for j in aligned]
        self._links: dict[int, list[int]] = defaultdict(list)  # from source words to these spans
        for i, j in alignment:
            self._links[i].append(bisect_left(aligned, j))
        self.html = self._content(text.root, 0, len(translation))  # the translation with all elements

    def _words(self, element: _Element) -> range:
        """The source words that an element contains, also in part."""
        return range(bisect_right(self._ends, element.begin), bisect_left(self._begins, element.end))

    def _content(self, parent: _Element, begin: int, end: int) -> str:
        """A part of the translation as HTML, with the elements that are in it. If the places of two elements
        overlap, the second one begins where the first one ends."""
        places = [(*self._place(element, parent, begin, end), element) for element in parent.children]
        html, done = "", begin
        for first, last, element in sorted(places, key=lambda place: place[0]):
            first, last = max(first, done), max(last, done)
            html += escape(self._translation[done:first], quote=False)
            at, is_empty = element.begin, first == last
            before, after = self._text[max(0, at - 1) : at], self._text[at : at + 1]
            is_apart = before.isspace() and html[-1:] not in ("", before)
            html += before * (is_empty and last == end and is_apart)
            content = "" if element.is_kept else self._content(element, first, last)
            html += element.start + content + element.close
            is_single = is_empty and last < end and at == element.end
            html += after * (is_single and after.isspace() and self._translation[last] != after)
            done = last
        return html + escape(self._translation[done:end], quote=False)

    def _place(self, element: _Element, parent: _Element, begin: int, end: int) -> tuple[int, int]:
        """The characters of the translation that an element contains, between `begin` and `end`. If there are
        none, both numbers are the position of the element."""
        words = self._words(element)
        linked = sorted({link for word in words for link in self._links[word]})
        inside = [i for i in linked if max(begin, self._spans[i][0]) < min(end, self._spans[i][1])]
        if not inside:
            at = self._position(element, parent, begin, end)
            return at, at
        runs = [[*run] for _, run in groupby(enumerate(inside), lambda pair: pair[1] - pair[0])]
        run = max(runs, key=len)
        first, last = max(begin, self._spans[run[0][1]][0]), min(end, self._spans[run[-1][1]][1])
        cut_before, cut_after = (self._begins[words[0]] < element.begin, self._ends[words[-1]] > element.end)
        same = self._text[element.begin : element.end].strip()  # such as the number of a footnote
        if (cut_before or cut_after) and (at := self._translation.find(same, first, last)) >= 0:
            return at, at + len(same)
        if words == self._words(parent):
            first, last = begin, end
        while cut_before and first < last and _PUNCTUATION.match(self._translation, first):
            first += 1
        while cut_after and first < last and _PUNCTUATION.match(self._translation, last - 1):
            last -= 1
        return first, last

    def _position(self, element: _Element, parent: _Element, begin: int, end: int) -> int:
        """Where an element without words is placed: before the translation of the word after it or, if it
        follows a word without a space, after the translation of this word."""
        words, word = self._words(parent), self._words(element).stop  # the word after it
        if word <= words.start or word >= words.stop:
            return begin if word < words.stop else end
        after = min((self._spans[i][0] for i in self._links[word]), default=end)
        before = max((self._spans[i][1] for i in self._links[word - 1]), default=after)
        return min(max(begin, before if self._ends[word - 1] == element.begin else after), end)
