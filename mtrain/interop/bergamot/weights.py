"""Marian's files of weights: its binary format, which Bergamot reads, and NumPy's `.npz`, which training
writes. Both map names to arrays; one of them holds the options of the model as YAML text."""

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrain.errors import ModelError
from mtrain.regular_files import UNLIMITED, read_file

# What readers of damaged files raise; NotImplementedError of an unknown compression is a RuntimeError.
_DAMAGED = (
    *(OSError, EOFError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)

Arrays = Mapping[str, npt.NDArray[Any]]

OPTIONS = "special:model.yml"  # the name of the text, which ends in a zero byte
_VERSION = 1
_TEXT, _FLOAT32, _INTGEMM8 = 0x0101, 0x0404, 0x4101  # types of arrays
# The length of the name with its zero byte, the type, the number of dimensions, the number of bytes.
_HEADER = struct.Struct("<4Q")
_COUNT = struct.Struct("<Q")
_ALIGNMENT = 256  # bytes
# The matrices of linear maps. Not the untied matrix of the output, `_Wt`, which the engine quantizes itself.
_QUANTIZED = re.compile(r"(_W[^t]?|Wemb)$")


def write_binary(file: Path, arrays: Arrays, options: str, int8: bool) -> None:
    """Write arrays in fp32 and the text of the options in the binary format. With `int8`, matrices are
    quantized: the integers round(w * 127 / max|w|), then this factor."""
    items = [(name, *_stored(name, arrays[name], int8), arrays[name].shape) for name in sorted(arrays)]
    text = options.encode() + b"\0"
    items.append((OPTIONS, _TEXT, text, (len(text),)))
    padded = [contents + bytes(-len(contents) % _ALIGNMENT) for _, _, contents, _ in items]
    parts = [_COUNT.pack(_VERSION), _COUNT.pack(len(items))]
    for (name, kind, _, shape), contents in zip(items, padded, strict=True):
        parts.append(_HEADER.pack(len(name) + 1, kind, len(shape), len(contents)))
    parts += [f"{name}\0".encode() for name, *_ in items]
    parts += [struct.pack(f"<{len(shape)}i", *shape) for *_, shape in items]
    gap = _ALIGNMENT - (sum(map(len, parts)) + _COUNT.size) % _ALIGNMENT
    file.write_bytes(b"".join([*parts, _COUNT.pack(gap), bytes(gap), *padded]))


def _stored(name: str, values: npt.NDArray[Any], int8: bool) -> tuple[int, bytes]:
    """The type and the bytes of an array."""
    if not (int8 and _QUANTIZED.search(name)):
        return _FLOAT32, values.astype("<f4").tobytes()
    factor = np.float32(127 / (np.abs(values).max() or 1))
    turned = values if name.endswith("Wemb") else values.T  # the shape stays the original one
    return _INTGEMM8, np.rint(turned * factor).astype(np.int8).tobytes() + factor.astype("<f4").tobytes()


def read_weights(file: Path) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """The arrays in an `.npz` file or a file in the binary format, in fp32, and the text of the options.

    Raises ModelError if the file is damaged or has no such text.
    """
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as stored:
                arrays = {name: np.asarray(stored[name]) for name in stored.files}  # other files are bytes
        else:
            arrays = _read_binary(read_file(file, UNLIMITED))
        text = arrays.pop(OPTIONS).tobytes().rstrip(b"\0").decode()
    except KeyError:
        raise ModelError(f"{file}: has no {OPTIONS}; is it a model of Marian?") from None
    except _DAMAGED as error:
        raise ModelError(f"{file}: damaged, or not weights of Marian: {error}") from None
    for name, array in arrays.items():
        if array.dtype not in (np.float32, np.float16) or array.ndim not in (1, 2):
            found = f"{array.ndim} dimensions of {array.dtype}"
            raise ModelError(f"{file}: {name} has {found}; expected 1 or 2 of float32")
    return {name: array.astype(np.float32, copy=False) for name, array in arrays.items()}, text


def _read_binary(contents: bytes) -> dict[str, npt.NDArray[Any]]:
    """The arrays in the binary format; quantized ones are restored. Raises ValueError or struct.error."""
    stream = BytesIO(contents)

    def take(size: int) -> bytes:
        return stream.read(min(size, len(contents)))  # sizes in damaged files can be too large for `read`

    version, count = struct.unpack("<2Q", take(2 * _COUNT.size))
    if version != _VERSION:
        raise ValueError(f"the version is {version}; expected {_VERSION}")
    headers = list(_HEADER.iter_unpack(take(count * _HEADER.size)))
    names = [take(length)[:-1].decode() for length, *_ in headers]
    shapes = [struct.unpack(f"<{dimensions}i", take(4 * dimensions)) for _, _, dimensions, _ in headers]
    [gap] = _COUNT.unpack(take(_COUNT.size))
    take(gap)
    return {
        name: _restored(name, kind, shape, take(size))
        for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True)
    }


def _restored(name: str, kind: int, shape: tuple[int, ...], stored: bytes) -> npt.NDArray[Any]:
    """The array that `_stored` has made bytes of."""
    if kind not in (_TEXT, _FLOAT32, _INTGEMM8):
        raise ValueError(f"{name} has the unknown type {kind:#06x}")
    size = math.prod(shape)
    values = np.frombuffer(stored, "<f4" if kind == _FLOAT32 else np.int8, size)
    if kind != _INTGEMM8:
        return values.reshape(shape)
    [factor] = np.frombuffer(stored, "<f4", 1, size)
    if not factor:
        raise ValueError(f"{name} is quantized with the factor 0")
    restored: npt.NDArray[Any] = values.astype(np.float32) / factor
    return restored.reshape(shape) if name.endswith("Wemb") else restored.reshape(shape[::-1]).T
