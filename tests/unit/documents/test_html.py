"""HTML: texts out, translations in, every tag kept."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.decoding.alignment import word_spans
from mtrain.documents.html import Html


def same(text):
    """A translation that is the text itself."""
    return text, tuple((i, i) for i in range(len(word_spans(text))))


def reversed_words(text):
    words = text.split()
    return " ".join(words[::-1]), tuple((i, len(words) - 1 - i) for i in range(len(words)))


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ("<code>git <b>commit</b> -m</code>", "git commit -m"),
        ("<code>make all<br>make <p>install</code>", "make all make install"),
        ('<span translate="no">two <span>three</span></span>', "two three"),
        ("<i class=notranslate>a &amp; b</i>", "a & b"),
    ],
)
def test_what_is_not_to_be_translated_is_kept(kept, text):
    document = Html(f"<p>Run {kept} now</p>")
    assert document.texts == [f"Run {text} now"]
    words = len(word_spans(text))
    translation = " ".join(["Now", *["x"] * words, "run"]), tuple((i, i) for i in range(1, words + 1))
    assert document.with_translations([translation]) == f"<p>Now {kept} run</p>"


@pytest.mark.parametrize(
    ("source", "translation", "expected"),
    [
        ("One line.\n\nTom & Jerry.\n", "Eine Zeile.\n\nTom & Jerry.", "Eine Zeile.\n\nTom & Jerry.\n"),
        ("a < b", "a < b, a <b>", "a < b, a &lt;b>"),
        ("AT&T", "AT&T &copy;", "AT&amp;T &amp;copy;"),
    ],
)
def test_html_without_markup_is_plain_text(source, translation, expected):
    document = Html(source)
    assert document.texts == [source.strip()]
    assert document.with_translations([(translation, ())]) == expected


def translated(html, translate):
    document = Html(html)
    return document.with_translations([translate(text) for text in document.texts])


@pytest.mark.parametrize(
    ("html", "texts"),
    [
        ("<h1>One</h1>\n  <p>Two <b>big</b> words</p>", ["One", "Two big words"]),
        ("a<br>b<hr/>c", ["a", "b", "c"]),
        ("<p>one\n   line &amp; more</p>", ["one line & more"]),
        ("<pre>two\n  lines</pre>", ["two\n  lines"]),
        ("\nbroken\n   line\n", ["broken line"]),
        ("<div><pre>one\n  two</div><p>three\n   line</p>", ["one\n  two", "three line"]),
        ("<script>if (a < b) f('<p>no</p>')</script><style>p{}</style>yes", ["yes"]),
        ("<pre><code>no\n</code></pre><p><kbd>no</kbd> <b><var>no</var></b></p>x", ["x"]),
        ("<div class='a notranslate'><div>no</div> no</div><p>yes</p>", ["yes"]),
        ("<br translate=no>yes<p translate=no>no</p>yes", ["yes", "yes"]),
        ("<section translate='no'>no <p>no", []),
        ("<p translate='no'>no <b>no<br>no<p>yes<h2 class=notranslate>no</h2>", ["yes"]),
        ("<p translate='no'>no<ul>yes</ul>", ["yes"]),
        ("<p translate=no>no</b> no<p>yes", ["yes"]),
        ("<i><p translate=no>no</i> no<p>yes", ["yes"]),
        ("<p translate=no>no<p>yes</p></p>", ["yes"]),
        ("<div><p translate=no>no</div>yes</p>yes", ["yes", "yes"]),
        (
            "<p data-translate=no>yes<p data-class='notranslate'>yes<p title='class=notranslate'>yes",
            ["yes"] * 3,
        ),
        ("<p CLASS = 'a\nnotranslate b'>no<p class=notranslated>yes", ["yes"]),
        ("<ul><li class=notranslate>no<ul><li>no</li></ul><li>yes</ul>yes", ["yes", "yes"]),
        ("<ul><li>yes<li class=notranslate>no</ul>yes", ["yes", "yes"]),
        ("<table><tr><th translate=no>no<td>yes<tr translate=no><td>no<tr><td>yes</table>", ["yes", "yes"]),
        ("<pre><code><div>no</div></code></pre>yes", ["yes"]),
        ("<code>yes<p>yes", ["yes", "yes"]),
        ("<style-guide>yes</style-guide><STYLE >no</style>", ["yes"]),
        ("yes <a><svg><text>no</text></svg> yes</a>, <math><mi>no</mi></math>!", ["yes yes, !"]),
        ("yes <svg class=icon /> yes<p>yes</p>", ["yes yes", "yes"]),
        ("<table><thead><tr translate=no><th>no<th>no<tbody><tr><td>yes<td>x</table>", ["yes", "x"]),
        ("<select><option translate=no>no<optgroup label=x><option>yes</select>", ["yes"]),
        ("<select><optgroup translate=no><option>no<optgroup><option>yes</select>", ["yes"]),
        ("<table><thead translate=no><tr><th>no<tbody translate=no><tr><td>no<tbody><tr><td>yes", ["yes"]),
        ("<p>yes <user-name>yes</user-name>, <x id=1/>yes</p>", ["yes yes, yes"]),
        ("<button>yes</button><select><option>yes</select>yes", ["yes"] * 3),
        ("<p translate=no>no <x-y>no</x-y> <button>no</button> no<p>yes", ["yes"]),
        ("yes<!--><p>yes</p><!---><p>yes</p><!-- > -- no --!><p>yes</p>", ["yes"] * 4),
        ("<script>'class=notranslate'</script>translate=no<p>yes</p>", ["translate=no", "yes"]),
        ("<!-- no --><textarea>no</textarea> <a><img alt=no></a>", []),
        ("<p class=\"a\"\">yes</p><p title=don't>yes</p><p title = 'a > b' x>yes</p>", ["yes"] * 3),
        ("yes<p title='no>", ["yes"]),
        ("", []),
        ("plain", ["plain"]),
    ],
)
def test_texts_are_paragraphs_without_markup(html, texts):
    document = Html(html)
    assert document.texts == texts
    assert document.with_translations([same(text) for text in texts]) == html.replace("\n   line", " line")


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p>red <b>cats</b></p>", "<p><b>cats</b> red</p>"),
        ("<b>red cats</b>", "<b>cats red</b>"),
        ("the <a href='x>y'><i>red</i> cats</a> sleep", "sleep <a href='x>y'>cats <i>red</i></a> the"),
        ("water<sup>1</sup> and (<b>fire</b>).", "(<b>fire</b>). and water<sup>1</sup>"),
        ("see <a href=/x/>red cats</a> now", "now <a href=/x/>cats red</a> see"),
        ("see <img src=1> red <br>dog", "<img src=1> red see <br>dog"),
        ("one <b>two</b> <i>three</i> &lt;x&gt;", "&lt;x&gt; <i>three</i> <b>two</b> one"),
    ],
)
def test_tags_follow_their_words(html, expected):
    assert translated(html, reversed_words) == expected


def test_an_element_without_aligned_words_stays_and_is_empty():
    found = translated("<p>I <b>do</b> not</p>", lambda _: ("ich nicht", ((0, 0), (2, 1))))
    assert found == "<p>ich <b></b>nicht</p>"


def test_of_scattered_words_the_longest_run_is_in_the_element():
    found = translated("<b>a b c</b> d", lambda _: ("A D B C", ((0, 0), (3, 1), (1, 2), (2, 3))))
    assert found == "A D <b>B C</b>"


@pytest.mark.parametrize(
    "html",
    [
        "</b>x</i> y <b>z",
        "<b><p>one two</p></b>",
        "a <b>b <i>c</b> d</i> e",
        "x <unknown-tag>y</unknown-tag> z",
        "a <svg> b ",
        "<li>\n  <a href=x><img src=1><img src=2></a> Hello <b>world</b></li>",
    ],
)
def test_unbalanced_and_empty_elements_are_kept(html):
    assert translated(html, same) == html


@pytest.mark.parametrize(
    "html", ["one <i>two</i><sup>1</sup> three", "a <b>b-</b><code>c</code> d", "<code>a</code><b>-b</b> c"]
)
def test_elements_that_share_a_word_stay_beside_each_other(html):
    assert translated(html, same) == html


class Collector(HTMLParser):
    """The tags of a text, in order."""

    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *attrs))

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")


PIECES = [
    "one",
    "two",
    " ",
    "\n",
    ".",
    "&amp;",
    "&nbsp;",
    "日本",
    "<b>",
    "</b>",
    "<i class=x>",
    "</i>",
    "<p>",
    "</p>",
]
PIECES += ["<img>", "<br/>", "<!-- c -->", "<pre>", "</pre>"]


@given(st.lists(st.sampled_from(PIECES)).map("".join), st.sampled_from([same, reversed_words]), st.randoms())
def test_no_tag_is_lost_or_added(html, translate, draw):
    def shuffled(text):
        translation, alignment = translate(text)
        kept = [link for link in alignment if draw.random() < 0.7]
        words = len(word_spans(translation))
        return translation, tuple((i, j) for i, j in kept if j < words)

    found = translated(html, shuffled)
    assert sorted(map(str, Collector(found).tags)) == sorted(map(str, Collector(html).tags))
    assert found.count("<!-- c -->") == html.count("<!-- c -->")
    words = re.findall(r"\w", re.sub(r"<.*?>|&\w+;", "", html))
    assert sorted(re.findall(r"\w", re.sub(r"<.*?>|&\w+;", "", found))) == sorted(words)


@pytest.mark.parametrize(
    "html",
    [
        "<b>" * 20_000 + "x",
        "<b>" * 49 + "a " * 15_000,
        "<b>a</b> " * 10_000,
        "<b><i>a</i></b> " * 10_000,
        "<code>a " * 10_000,
        "<svg " * 30_000,
        "<p translate=no><b></i>" * 10_000,
        "<!--" * 20_000,
        "<a b='" * 15_000,
        "<a " + "=" * 50_000 + " />",
        "&" * 50_000,
        "<" * 50_000,
    ],
)
def test_hostile_markup_is_not_slow(html):
    assert translated(html, same).count("x") == html.count("x")


@pytest.mark.parametrize(
    "html",
    [
        "<td>&nbsp;Name&nbsp;</td>",
        "<p> &nbsp; &#160;&#xA0;&emsp;One two &ensp;&NonBreakingSpace;\n</p>",
        "<p>\u3000\u3000\u4f60\u597d\u3000</p>",
        "<p>&nbsp;<b>One</b>&nbsp;two &amp;&nbsp;</p>",
        "<p>\xa0&amp;nbsp; R&D; x&;</p>",
        "<p>&nbspOne two&nbsp</p>",
        "<p><i class='icon'></i>\xa0Save it</p>",
        "<p>Read more\xa0<img src='a.png'></p>",
        "<p>&#160One two&#x00000000000000a0;</p>",
        "<p><b>\xa0Name</b></p>",
        "<p><i>\u3000<b>One</b> two\xa0</i> </p>",
        "<pre><b>    One\n  two  </b> \n</pre>",
        "<pre> <i> One <code>a </code></i></pre>",
    ],
)
def test_every_kind_of_space_around_a_text_is_kept(html):
    assert translated(html, same) == html.replace("R&D; x&;", "R&amp;D; x&amp;;").replace(
        "</b>&nbsp;", "</b>\xa0"
    )


def test_a_reference_to_a_huge_number_is_no_character():
    assert Html(f"<p>One &#{'1' * 5000}; two</p>").texts == ["One \ufffd two"]
