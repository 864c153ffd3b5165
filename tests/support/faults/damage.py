"""Damaged files: flipped and missing bytes, which checksums detect, and mutations behind a valid manifest."""

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mtrain.checkpoint.checkpoint import CHECKPOINT_FILES, checkpoint_folders
from mtrain.errors import ModelError
from mtrain.storage.manifest import CARD, INFO, MANIFEST, verify_folder, write_manifest
from tests.support.faults.runs import Outcome

# Hostile values that replace a number or a word in a text or in the header of a safetensors file.
HOSTILE_VALUES = [
    *(
        "0",
        "-1",
        "1",
        "65536",
        "2147483648",
        "9223372036854775807",
        "1" * 400,
        "1e309",
        "NaN",
        "null",
        "true",
    ),
    *("[]", "{}", '""', '"../../x"', "!!python/object/apply:os.system ['exit 9']", "[" * 3000, "a: " * 3000),
    *("&a [*a]", "\x00", "\ud7ff", "F64", "I8", "step-99999999", "/dev/zero", "-" * 5000),
]


def damaged_copies(contents: bytes, at: int, bits: int = 0x2A) -> Iterator[bytes]:
    """The contents of a file cut at a byte, and with bits of that byte flipped."""
    yield contents[:at]
    yield contents[:at] + bytes([contents[at] ^ bits]) + contents[at + 1 :]


def flip_bytes(
    run: Path, tries: int, seed: int = 2, verify: Callable[[Path, Sequence[str]], None] = verify_folder
) -> Outcome:
    """Flip a random byte of each file of a checkpoint and a model folder in turn, or cut the file there, and
    count the damage that `verify` misses. The files that only describe the model are left out."""
    draw, corrupt = random.Random(seed), 0
    checkpoint, model = checkpoint_folders(run)[-1], run / "model"
    files = [(checkpoint, file) for file in sorted(checkpoint.iterdir())]
    described = {model / CARD, model / INFO}
    files += [(model, file) for file in sorted({*model.rglob("*")} - described) if file.is_file()]
    for number in range(tries):
        folder, file = files[number % len(files)]
        before = file.read_bytes()
        cut, flipped = damaged_copies(before, draw.randrange(len(before)), draw.randint(1, 255))
        file.write_bytes(cut if draw.random() < 0.3 else flipped)
        try:
            verify(folder, CHECKPOINT_FILES if folder == checkpoint else ["config.yaml"])
            corrupt += 1
        except ModelError:
            pass
        file.write_bytes(before)
    return Outcome("bytes flipped, files cut", tries, 0, corrupt)


# ----------------------------------------------------------------------------------------------- mutations


def _flip(data: bytes, draw: random.Random) -> bytes:
    mutated = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        if mutated:
            mutated[draw.randrange(len(mutated))] = draw.randrange(256)
    return bytes(mutated)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _noise(data: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 7, 8, 9, 100, len(data))))


def _splice(data: bytes, draw: random.Random) -> bytes:
    one, two, to = sorted(draw.randrange(len(data) + 1) for _ in range(3))
    return data[:to] + data[one:two] * draw.choice((1, 2, 50)) + data[draw.choice((two, to)) :]


def _replace_values(data: bytes, draw: random.Random) -> bytes:
    """Hostile values in a text, or in the header of a file of tensors."""
    header = min(len(data), 8 + int.from_bytes(data[:8], "little")) if data[8:9] == b"{" else len(data)
    words = list(re.finditer(rb"[\w.+-]+|\"[^\"]*\"", data[:header]))
    for _ in range(draw.choice((1, 1, 3))):
        if words:
            word = draw.choice(words)
            data = data[: word.start()] + draw.choice(HOSTILE_VALUES).encode() + data[word.end() :]
            words = [other for other in words if other.end() < word.start()]
    if header < len(data) and draw.random() < 0.8:  # correct the length of the header
        grown = data[8:].find(b"}}") + 2
        data = max(grown, 0).to_bytes(8, "little") + data[8:]
    return data


MUTATIONS = (_flip, _cut, _noise, _splice, _replace_values, _replace_values)


def mutate_file(file: Path, draw: random.Random) -> str:
    """Mutate the contents of a file; returns a description."""
    mutation = draw.choice(MUTATIONS)
    file.write_bytes(mutation(file.read_bytes(), draw))
    return f"{file.name} by {mutation.__name__}"


def _replace_file(file: Path, draw: random.Random) -> str:
    """Put something that is not a regular file, or nothing, in the place of a file."""
    file.unlink()
    kind = draw.choice(("pipe", "folder", "link", "link to a neighbor", "nothing"))
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "link":
        file.symlink_to(draw.choice(("/dev/zero", "/etc/passwd", ".", file.name, "../config.yaml")))
    elif kind == "link to a neighbor":
        file.symlink_to(draw.choice(list(file.parent.iterdir()) or [file]))
    return f"{file.name} by {kind}"


def mutate_folder(folder: Path, draw: random.Random) -> str:
    """Mutate one to three files of a folder, and mostly rewrite the manifests to match.

    Returns a description.
    """
    changes, files = [], sorted(f for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        file = draw.choice(files)
        files.remove(file)
        changes.append(_replace_file(file, draw) if draw.random() < 0.1 else mutate_file(file, draw))
    if draw.random() < 0.8:
        for manifest in folder.rglob(MANIFEST):
            if not any(MANIFEST in change for change in changes) and manifest.parent.is_dir():
                try:
                    write_manifest(manifest.parent)
                    changes.append("manifest rewritten")
                except OSError:
                    pass
    return "; ".join(changes)
