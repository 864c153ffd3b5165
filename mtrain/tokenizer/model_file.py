"""Functions for model files that SentencePiece's Python interface lacks: types of pieces, removing paths,
adding pieces, writing a model from given pieces.

A model is a protocol buffer (https://protobuf.dev/programming-guides/encoding): a sequence of fields, each a
key (8 * number + wire type) followed by a value. Its fields are named in `sentencepiece_model.proto`.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT_OF_PIECE, _SCORE_OF_PIECE, _TYPE_OF_PIECE = 1, 2, 3
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # types of pieces
_MODEL_TYPE, _BPE = 3, 2  # of the trainer
# The files that a model was learned with, by the field of the model and the field inside it: the seeds, and
# the rules of the normalizer and of the denormalizer.
_PATHS = {2: 54, 3: 6, 5: 6}
_RULES = 2  # of a normalizer, compiled
_VARINT, _BYTES, _FLOAT = 0, 2, 5  # wire types


class _Field(NamedTuple):
    number: int
    value: int | bytes  # numbers of fixed size as bytes
    raw: bytes  # key and value


def types_of_pieces(model: bytes) -> list[int | bytes]:
    """The type of each piece of a serialized model."""
    return [
        next((type_ for number, type_, _ in _fields(piece) if number == _TYPE_OF_PIECE), _NORMAL)
        for number, piece, _ in _fields(model)
        if number == _PIECES and isinstance(piece, bytes)
    ]


def has_rules(normalizer: bytes) -> bool:
    """Whether a serialized normalizer changes characters."""
    return any(number == _RULES and value for number, value, _ in _fields(normalizer))


def without_paths(model: bytes) -> bytes:
    """A serialized model without the paths of the files that it was learned with."""
    parts = []
    for number, value, raw in _fields(model):
        if number in _PATHS and isinstance(value, bytes):
            contents = b"".join(each.raw for each in _fields(value) if each.number != _PATHS[number])
            raw = _field(number, contents)
        parts.append(raw)
    return b"".join(parts)


def bpe_model(pieces: Sequence[str], rules: bytes) -> bytes:
    """A serialized model of the type BPE, with the pieces <unk>, <s> and </s> before others, which it merges
    in their order, and the compiled rules of its normalizer."""
    special = [("<unk>", 0.0, _UNKNOWN), ("<s>", 0.0, _CONTROL), ("</s>", 0.0, _CONTROL)]
    learned = [(piece, -float(rank), _NORMAL) for rank, piece in enumerate(pieces)]
    parts = [_field(_PIECES, _piece(*each)) for each in [*special, *learned]]
    parts.append(_field(_TRAINER, bytes([8 * _MODEL_TYPE + _VARINT, _BPE])))
    return b"".join([*parts, _field(_NORMALIZER, _field(_RULES, rules))])


def with_control_pieces(model: bytes, names: Sequence[str]) -> bytes:
    """A serialized model with more pieces at its end, which stand for no text."""
    return model + b"".join(_field(_PIECES, _piece(name, 0.0, _CONTROL)) for name in names)


def _piece(text: str, score: float, type_: int) -> bytes:
    scored = bytes([8 * _SCORE_OF_PIECE + _FLOAT]) + struct.pack("<f", score)
    return _field(_TEXT_OF_PIECE, text.encode()) + scored + bytes([8 * _TYPE_OF_PIECE + _VARINT, type_])


def _field(number: int, contents: bytes) -> bytes:
    return bytes([8 * number + _BYTES]) + _varint(len(contents)) + contents


def _fields(message: bytes) -> Iterator[_Field]:
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            value |= (byte & 127) << shift
            shift += 7
            position += 1
            if byte < 128:
                return value

    while position < len(message):
        start = position
        key = varint()
        value: int | bytes
        if key & 7 == _VARINT:
            value = varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            value = message[position : position + size]
            position += size
        yield _Field(key >> 3, value, message[start:position])


def _varint(number: int) -> bytes:
    """A number as 7 bits a byte, the lowest first; all bytes but the last have the highest bit set."""
    rest = number >> 7
    return bytes([number & 127 | 128]) + _varint(rest) if rest else bytes([number])
