"""Damaged folders given to what loads them: an error that says so, or success; never a crash, a hang, or code
that runs."""

import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from mtrain.checkpoint.checkpoint import checkpoint_folders, load_checkpoint, open_checkpoint
from mtrain.checkpoint.model_folder import load_model
from mtrain.config.load import load_config, read_yaml_file, validate
from mtrain.config.schema import ModelFolderConfig, TrainingConfig
from mtrain.model.transformer import Transformer
from mtrain.storage.atomic import MANIFEST, write_manifest
from mtrain.training.step import make_optimizer
from tortures.children import begin, wait
from tortures.training import Outcome

SECONDS, BYTES = 5, 2**30  # that loading may take
EXECUTED = 99  # exit code
EVIL = (
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
)
EVIL += (
    "[]",
    "{}",
    '""',
    '"../../x"',
    "!!python/object/apply:os.system ['exit 9']",
    "[" * 3000,
    "a: " * 3000,
)
EVIL += ("&a [*a]", "\x00", "\ud7ff", "F64", "I8", "step-99999999", "/dev/zero", "-" * 5000)
FORBIDDEN = re.compile(
    r"os\.(system|exec|spawn|posix_spawn|fork|remove|rename|mkdir|rmdir|kill)|subprocess\.Popen|socket\.connect|pickle\.find_class"
)


# ------------------------------------------------------------------------------------------------- damages


def _flip(data: bytes, draw: random.Random) -> bytes:
    held = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        if held:
            held[draw.randrange(len(held))] = draw.randrange(256)
    return bytes(held)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _noise(data: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 7, 8, 9, 100, len(data))))


def _splice(data: bytes, draw: random.Random) -> bytes:
    one, two, to = sorted(draw.randrange(len(data) + 1) for _ in range(3))
    return data[:to] + data[one:two] * draw.choice((1, 2, 50)) + data[draw.choice((two, to)) :]


def _number(data: bytes, draw: random.Random) -> bytes:
    """Another number, word or value in a text, or in the header of a file of tensors."""
    head = min(len(data), 8 + int.from_bytes(data[:8], "little")) if data[8:9] == b"{" else len(data)
    words = list(re.finditer(rb"[\w.+-]+|\"[^\"]*\"", data[:head]))
    for _ in range(draw.choice((1, 1, 3))):
        if words:
            word = draw.choice(words)
            data = data[: word.start()] + draw.choice(EVIL).encode() + data[word.end() :]
            words = [other for other in words if other.end() < word.start()]
    if head < len(data) and draw.random() < 0.8:  # the length of the header is right again
        grown = data[8:].find(b"}}") + 2
        data = max(grown, 0).to_bytes(8, "little") + data[8:]
    return data


BYTES_OF = (_flip, _cut, _noise, _splice, _number, _number)


def _replace(file: Path, draw: random.Random) -> None:
    """Something that is no regular file in the place of one."""
    file.unlink()
    kind = draw.randrange(5)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to(draw.choice(("/dev/zero", "/etc/passwd", ".", file.name, "../config.yaml")))
    elif kind == 3:
        file.symlink_to(draw.choice(list(file.parent.iterdir()) or [file]))
    # or nothing at all


def damage(folder: Path, draw: random.Random) -> str:
    """Damage a file, or a few; mostly the manifests are made right again. Returns what was done."""
    done, files = [], sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        file = draw.choice(files)
        files.remove(file)
        way = _replace if draw.random() < 0.1 else draw.choice(BYTES_OF)
        if way is _replace:
            way(file, draw)
        else:
            file.write_bytes(way(file.read_bytes(), draw))
        done.append(f"{file.relative_to(folder)} by {way.__name__}")
    if draw.random() < 0.8:
        for manifest in folder.rglob(MANIFEST):
            if not any(MANIFEST in what for what in done) and manifest.parent.is_dir():
                try:
                    write_manifest(manifest.parent)
                    done.append("manifest remade")
                except OSError:
                    pass
    return "; ".join(done)


# ------------------------------------------------------------------------------------------------- loaders


def _use(path: Path) -> None:
    """Load a model as every command does, and take a sentence through it."""
    model, tokenizer, config, _ = load_model(path)
    ids = [*tokenizer.encode_source(["It is a \u2581 test."])[0][:9], tokenizer.special.eos]
    source = torch.tensor([ids])
    with torch.no_grad():
        model(source, torch.ones_like(source, dtype=torch.bool), torch.tensor([[config.model.bos_id]]))
    tokenizer.word_starts(ids)
    tokenizer.decode([list(range(min(50, tokenizer.target_vocab_size)))])
    tokenizer.fingerprint()


def _resume(path: Path, good: Path) -> None:
    """Open and load a checkpoint, as training does that goes on."""
    config = validate(ModelFolderConfig, read_yaml_file(good / "model/config.yaml"), "fuzz")
    model = Transformer(config.model)
    for folder in checkpoint_folders(path):
        load_checkpoint(open_checkpoint(folder), model, make_optimizer(model, TrainingConfig(max_steps=1)))


# By what it loads, from a damaged copy of a run; and what of the copy is damaged for it.
LOADERS: dict[str, Callable[[Path, Path], object]] = {
    "model folder": lambda path, _: _use(path / "model"),
    "run folder": lambda path, _: _use(path),
    "checkpoint": _resume,
    "config": lambda path, _: load_config(path / "config.yaml"),
}


def damage_for(kind: str, copy: Path, draw: random.Random) -> str:
    """Damage what a loader reads of a copy of a run; returns what was done."""
    if kind == "config":
        way = draw.choice(BYTES_OF)
        (copy / "config.yaml").write_bytes(way((copy / "config.yaml").read_bytes(), draw))
        return way.__name__
    if kind == "run folder":
        shutil.rmtree(copy / "data")  # which is never loaded with a model
        shutil.rmtree(copy / "model")  # without which the best checkpoint is
    part = {"model folder": "model", "run folder": ".", "checkpoint": "checkpoints"}[kind]
    return damage(copy / part, draw)


def _guarded(load: Callable[[], object]) -> None:
    """Load, and end at once if anything is executed, written, removed or connected to."""

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and int(arguments[2]) & (os.O_WRONLY | os.O_RDWR)  # type: ignore[call-overload]
        if writes or FORBIDDEN.match(event):
            os.write(2, f"EXECUTED {event} {arguments}".encode())
            os._exit(EXECUTED)

    time.sleep = lambda _: None  # between the two times that a model folder is tried
    sys.addaudithook(watch)
    load()


def fuzzed(folder: Path, run: Path, minutes: float, seed: int) -> Outcome:
    """Give damaged copies of a run to loaders for so long."""
    end, tries, lost, corrupt = time.monotonic() + 60 * minutes, 0, 0, 0
    failures: list[str] = []
    codes, slowest, largest, told = Counter[str](), 0.0, 0, folder / "stderr"
    nothing = wait(begin(lambda: None)).memory
    while time.monotonic() < end:
        draw = random.Random(f"{seed} {tries}")
        copy = Path(shutil.copytree(run, folder / "damaged"))
        kind = draw.choice(list(LOADERS))
        what = damage_for(kind, copy, draw)
        found = wait(begin(lambda: _guarded(lambda: LOADERS[kind](copy, run)), told))  # noqa: B023
        grown = found.memory - nothing
        slowest, largest = max(slowest, found.cpu), max(largest, grown)
        codes[f"{kind}: {found.code}"] += 1
        if found.code == EXECUTED:
            corrupt += 1
        elif found.code not in (0, 2 if kind == "config" else 4) or found.cpu > SECONDS or grown > BYTES:
            lost += 1
        if lost + corrupt > len(failures):
            failures.append(f"    try {tries}: {kind}, {what}: {found}")
            print(failures[-1], told.read_text(errors="replace")[-1500:], flush=True)
        shutil.rmtree(copy)
        tries += 1
    ends = ", ".join(f"{name}: {count}" for name, count in sorted(codes.items()))
    remark = f"{minutes:g} minutes; at most {slowest:.1f} s and {largest / 2**20:.0f} MiB; {ends}"
    return Outcome("damaged folders given to loaders", tries, lost, corrupt, remark)
