"""The code blocks of the documentation, and how tests run them: on small corpora, with few steps."""

import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from mtrain.cli import main
from mtrain.data.reading.files import toy_pairs
from tests.support.paths import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Guides whose commands need the models of the guides before them.
CONNECTED_GUIDES = [
    ROOT / "docs" / "how-to" / f"{name}.md"
    for name in (
        "clean-a-corpus",
        "mix-corpora",
        "robust-models",
        "fine-tune",
        "back-translation",
        "distillation",
        "rerank-and-mbr",
    )
]
FEW_STEPS = {
    "training.max_steps": 2,
    "training.warmup_steps": 1,
    "training.batch_tokens": 512,
    "training.validate_every": 2,
    "tokenizer.vocab_size": 450,
    "model.d_model": 32,
    "model.ffn_dim": 64,
    "model.encoder_layers": 2,
    "decoding.max_length_ratio": 0.5,  # untrained models rarely end a sentence
    "decoding.max_length_offset": 4,
}


class Block(NamedTuple):
    """A fenced code block."""

    place: str  # page and line
    language: str
    mark: str  # the word after the language: "", "needs-data", "set-up" or "script"
    text: str

    @property
    def commands(self) -> list[str]:
        """The shell commands of the block, one string each."""
        joined = self.text.replace("\\\n", " ")
        return [" ".join(line.split()) for line in joined.splitlines() if line.strip()]


def blocks(page: Path) -> list[Block]:
    """The fenced code blocks of a page, in order; those inside a list are indented."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
    found = []
    for match in re.finditer(r"^( *)```(\w+)(?: ([\w-]+))?\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        indent, language, mark, body = match.groups()
        body = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        place = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        found.append(Block(place, language, mark or "", body))
    return found


def prepare(folder: Path) -> None:
    """Link configs and scripts into a folder; put toy pairs where the configs expect their corpora."""
    for name in ("configs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    captions, everyday = folder / "data/multi30k", folder / "data/tatoeba-en-de"
    for place in (captions, everyday):
        place.mkdir(parents=True)
    sizes = {"train": 200, "val": 8, "test_2016_flickr": 8, "test": 8}
    pairs = iter(toy_pairs("train"))
    for name, size in sizes.items():
        drawn = [next(pairs) for _ in range(size)]
        for index, language in enumerate(("en", "de")):
            lines = "".join(f"{pair[index]}\n" for pair in drawn)
            (captions / f"{name}.{language}").write_text(lines, encoding="utf-8")
        tsv = "".join(f"{pair.source}\t{pair.target}\n" for pair in drawn)
        (everyday / f"{name}.tsv").write_text(tsv, encoding="utf-8")
    mono = "".join(f"{next(pairs).target}\n" for _ in range(20))
    (captions / "mono.de").write_text(mono, encoding="utf-8")


def run(command: str) -> None:
    """Run a command in the working directory; mtrain in this process, also after `echo` and with `> FILE`.

    Raises SystemExit or CalledProcessError if it fails.
    """
    print(f"$ {command}", file=sys.stderr, flush=True)
    if command.startswith("#"):
        return
    before, _, last = command.rpartition(" | ")
    program, _, file = last.partition(" > ")
    if program.startswith("mtrain ") and (not before or before.startswith("echo ")):
        with ExitStack() as streams:
            if before:
                line = " ".join(shlex.split(before)[1:])
                stdin = io.TextIOWrapper(io.BytesIO(f"{line}\n".encode()), encoding="utf-8")
                streams.enter_context(patch.object(sys, "stdin", stdin))
            if file:
                out = streams.enter_context(Path(file).open("w", encoding="utf-8"))
                streams.enter_context(redirect_stdout(out))
            run_mtrain(shlex.split(program)[1:])
        return
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True, env=environment)


def run_mtrain(arguments: list[str]) -> None:
    """Run mtrain in this process; `fit` takes few steps. Raises SystemExit if it fails."""
    if arguments[0] == "fit":
        arguments = [*arguments, *(f"--set={key}={value}" for key, value in FEW_STEPS.items())]
    try:
        main(arguments)
    except SystemExit as end:
        if end.code:
            raise
