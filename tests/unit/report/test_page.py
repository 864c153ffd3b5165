"""Parts of HTML pages."""

import pytest

from mtrain.report.page import text_attributes


@pytest.mark.parametrize(
    ("code", "attributes"),
    [
        ("deu", 'dir="auto" lang="de"'),
        ("zho_Hant", 'dir="auto" lang="zh-Hant"'),
        ("csb", 'dir="auto" lang="csb"'),
        ("x_y", 'dir="auto" lang="x-y"'),
        (None, 'dir="auto"'),
    ],
)
def test_browsers_get_the_shortest_code_of_a_language(code, attributes):
    assert text_attributes(code) == attributes
