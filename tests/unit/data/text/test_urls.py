"""The URLs in texts: where they end in every script, and how they are compared."""

import pytest

from mtrain.data.text.urls import urls_of

A = "https://example.org/a"


@pytest.mark.parametrize(
    "text",
    [
        f"See {A}. It is free.",
        f"请看{A}。它是免费的。",
        f"打开{A}，然后登录。",
        f"请阅读（{A}）。",
        f"「{A}」をご覧ください",
        f"{A}を見る",
        f"{A}을 방문하세요",
        f"ไปที่{A}นะ",
        f"ចូលទៅ{A}។",
        f"देखें {A}।",
        f"هل رأيت {A}؟",
        f"راجع {A}، ثم",
        f"„{A}“",
        f"«{A}»",
        f"“{A}”",
        f"<{A}>",
        f"(see {A}).",
        f"[text]({A})",
        f"**{A}**",
        f"{A}'yı ziyaret edin",
        f"{A}’s first page",
        f"{A}—it is free",
        f"{A}\u200cهای دیگر",  # a Persian ending
        f"እዩ {A}።",
        f"ב־{A}׃",
        f"{A}؛ ثم",
        f"{A}-ზე 3",
        f"{A}-ից 3",
        f"{A}…",
        f"HTTPS://Example.ORG/a/ and {A}, {A}",
    ],
)
def test_a_url_ends_before_the_text_around_it(text):
    assert urls_of(text) == {A}


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("今天就访问www.example.org吧。", ["www.example.org"]),
        ("WWW.Example.org!", ["www.example.org"]),
        ("ftp://example.org/x;", ["ftp://example.org/x"]),
        ("https://example.org/wiki/a_(b)", ["https://example.org/wiki/a_(b)"]),
        ("(https://example.org/wiki/a_(b)).", ["https://example.org/wiki/a_(b)"]),
        ("https://example.org/a,b;c?d=1&e=2#f, and", ["https://example.org/a,b;c?d=1&e=2#f"]),
        ("http://[::1]:80/a)", ["http://[::1]:80/a"]),
        ("https://a.org/x,https://b.org/y；www.c.org", ["https://a.org/x", "https://b.org/y", "www.c.org"]),
        ("https://de.wikipedia.org/wiki/Köln", ["https://de.wikipedia.org/wiki/Köln"]),
        ("https://de.wikipedia.org/wiki/Ko\u0308ln", ["https://de.wikipedia.org/wiki/Köln"]),
        ("https://de.wikipedia.org/wiki/K%C3%B6ln.", ["https://de.wikipedia.org/wiki/Köln"]),
        ("https://пример.рф/страница, да", ["https://пример.рф/страница"]),
        ("https://hi.wikipedia.org/wiki/भारत।", ["https://hi.wikipedia.org/wiki/भारत"]),
        ("https://fa.wikipedia.org/wiki/می\u200cخواهم.", ["https://fa.wikipedia.org/wiki/می\u200cخواهم"]),
        ("https://a.org/%D9%85%DB%8C%E2%80%8C%D8%AE", ["https://a.org/می\u200cخ"]),
        ("https://example.org/a-длинное-имя", ["https://example.org/a-длинное-имя"]),
        ("www. and www... and https:// and none", []),
    ],
)
def test_urls_that_browsers_show(text, urls):
    assert urls_of(text) == {*urls}


def test_many_commas_are_not_slow():
    commas = 200_000 * ","
    assert urls_of(f"https://a.org/{commas} b") == urls_of(f"https://a.org/{commas}https://a.org/")


@pytest.mark.parametrize(
    "path", ["%E6%97%A5%E6%9C%AC", "%ED%95%9C", "%E0%B9%84%E0%B8%97", "%C4%E3", "k%C3%B6ln"]
)
def test_encoded_urls_of_different_pages_differ(path):
    page, other, folder = (f"https://example.org/wiki{end}" for end in (f"/{path}", "/%E4%B8%AD", ""))
    assert urls_of(f"打开{page}，或 {page.lower()}。") == urls_of(page)
    assert len(urls_of(f"{page} {other} {folder}")) == 3
