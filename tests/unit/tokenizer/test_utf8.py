"""Sequences of byte pieces that are valid UTF-8, compared with Python's decoder."""

from itertools import chain, product

from mtrain.tokenizer.utf8 import utf8_states

EDGES = bytes.fromhex("00417f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5ff")  # where a range begins or ends
WORD = 256  # a token that is no byte
AFTER = utf8_states({i: i for i in range(256)}, 257).tolist()


def is_allowed(tokens: tuple[int, ...]) -> bool:
    state = 0
    for token in tokens:
        state = AFTER[state][token]
        if state < 0:
            return False
    return state == 0


def is_valid(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def test_exactly_valid_characters_are_allowed() -> None:
    last = b"\x7f\x80\xbf\xc0"
    long = product(b"\xef\xf0\xf1\xf3\xf4\xf5", EDGES, last, last)
    for tokens in chain(product(range(256), repeat=2), product(EDGES, repeat=3), long):
        assert is_allowed(tokens) == is_valid(bytes(tokens)), tokens


def test_a_word_is_allowed_between_characters_only() -> None:
    assert is_allowed((WORD, 0xC3, 0xA9, WORD)) and not is_allowed((0xC3, WORD, 0xA9))
