"""Run the loops of the README, command by command as it has them, on a toy corpus with few steps:
`python scripts/loops.py FOLDER`. It proves that the commands fit together, not that the models are good."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from mtrain.cli import main
from mtrain.data.toy import toy_pairs

ROOT = Path(__file__).parent.parent
SECTION = "## One model from another"
FEW = {
    "training.max_steps": 4,
    "training.warmup_steps": 2,
    "training.batch_tokens": 512,
    "training.validate_every": 4,
    "tokenizer.vocab_size": 450,
    "model.d_model": 32,
    "model.ffn_dim": 64,
}


def commands(readme: str) -> list[str]:
    """The indented lines of the section, in order; each is one command."""
    section = re.split(r"\n## ", readme.partition(SECTION)[2], maxsplit=1)[0]
    return [line.partition(" # ")[0].strip() for line in section.splitlines() if line.startswith("    ")]


def prepare(folder: Path) -> None:
    """Put toy pairs where the recipes look for Multi30k and Tatoeba."""
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
    """Run a command in the working directory. Raises SystemExit or CalledProcessError if it fails."""
    print(f"$ {command}", file=sys.stderr, flush=True)
    if command.startswith("mtrain "):
        run_mtrain(shlex.split(command)[1:])
    else:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(command, shell=True, check=True, env={**os.environ, "PATH": path})


def run_mtrain(arguments: list[str]) -> None:
    """Run mtrain; `fit` with few steps. Raises SystemExit if it fails."""
    if arguments[0] == "fit":
        arguments = [*arguments, *(f"--set={key}={value}" for key, value in FEW.items())]
    try:
        main([*arguments, "--quiet", "--device", "cpu"])
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
    os.chdir(sys.argv[1])
    for line in commands((ROOT / "README.md").read_text(encoding="utf-8")):
        run(line)
