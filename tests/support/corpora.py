"""Corpora of every kind, and lines that are hard to read."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from mtrain.config.sections.corpora import Corpus
from mtrain.data import Pair
from mtrain.data.reading.blocks import Block, read_pairs


def corpus(**spec) -> Corpus:
    """A validated corpus section of a config."""
    return TypeAdapter(Corpus).validate_python(
        {k: str(v) if isinstance(v, Path) else v for k, v in spec.items()}
    )


def read(**spec) -> list[Pair]:
    """The pairs of a corpus."""
    return list(read_pairs(corpus(**spec), "error"))


def write(path: Path, lines: list[str], end: str = "\n", final: bool = True) -> Path:
    """Write a text file with the given line ends, and with or without the last one."""
    path.write_bytes((end.join(lines) + (end if final else "")).encode())
    return path


def block_of(pairs: Sequence[tuple[str, str]], first: int = 1) -> Block:
    """Readable pairs as a block. The first one has number `first` in its corpus."""
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    return Block(sources, targets, range(first, first + len(pairs)), {}, "file")


def text_pair(folder: Path, sources: bytes, targets: bytes) -> Corpus:
    """A corpus of two text files with the given contents."""
    (folder / "s.en").write_bytes(sources)
    (folder / "s.fr").write_bytes(targets)
    return corpus(source=folder / "s.en", target=folder / "s.fr")


# Lines with characters that other programs take for line ends, all of which are data.
DATA = [
    "plain",
    "a\rb",
    "\rc",
    "d\u2028e",
    "f\u2029g",
    "h\x85i",
    "j\x0bk",
    "l\x0cm",
    "\x1c\x1d\x1e",
    "",
    " ",
    "\ufeffz",
    "end",
]
# Lines that are not valid text: invalid UTF-8 and NUL.
BAD_BYTES = [b"caf\xe9", b"a\0b", b"\xed\xa0\x80", b"\xc0\x80", b"\xff\xfea\0", b"\xe2\x82"]
