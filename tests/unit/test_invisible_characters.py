"""Characters that cannot be seen, in labels and in messages."""

import pytest

from mtrain.invisible_characters import show_piece


@pytest.mark.parametrize(
    ("piece", "label"),
    [
        ("\u00a0", "U+00A0"),
        ("\u2581\u200b", "\u2581 U+200B"),
        ("\ufe0f", "U+FE0F"),
        ("\x1b", "U+001B"),
        ("\u2581", "\u2581"),
        ("می\u200c", "می\u200c"),
    ],
)
def test_pieces_that_cannot_be_seen_are_shown_as_code_points(piece: str, label: str):
    assert show_piece(piece) == label
