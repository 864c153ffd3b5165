"""Parts of HTML pages."""

import pytest

from mtrain.report.page import html_page, text_attributes


@pytest.mark.parametrize(
    ("code", "attributes"),
    [
        ("deu", 'dir="ltr" lang="de"'),
        ("zho_Hant", 'dir="ltr" lang="zh-Hant"'),
        ("csb", 'dir="ltr" lang="csb"'),
        ("x_y", 'dir="ltr" lang="x-y"'),
        (None, 'dir="ltr"'),
    ],
)
def test_browsers_get_the_shortest_code_of_a_language(code, attributes):
    assert text_attributes("text", code) == attributes


@pytest.mark.parametrize(
    ("text", "code", "direction"),
    [
        ("مرحبا!", "ar", "rtl"),
        ("iPhone الجديد هنا", None, "rtl"),  # begins with a Latin name
        ("موقع www.example.org", "ara_Arab", "rtl"),  # and most of its letters are Latin
        ("موقع www.example.org", None, "ltr"),
        ("Hello", "he", "ltr"),  # in another language
        ("A שלום.", "en", "rtl"),
        ("𞤀𞤣𞤤𞤢𞤥 a", "ff-Adlm", "rtl"),
        ("ߒߞߏ", "nqo", "rtl"),
        ("123", "ar", "ltr"),
        ("", None, "ltr"),
    ],
)
def test_text_has_the_direction_of_its_language_or_of_most_letters(text, code, direction):
    assert text_attributes(text, code).startswith(f'dir="{direction}"')


def test_a_viewer_without_scripts_says_what_is_missing():
    page = html_page("Title", '<main id="main"></main>')
    assert "<noscript><p>Charts and attention maps need scripts" in page
