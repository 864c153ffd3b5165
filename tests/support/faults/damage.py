"""Flipped and missing bytes, all of which must be noticed."""

import random
from pathlib import Path

from mtrain.checkpoint.checkpoint import CHECKPOINT_FILES, checkpoint_folders
from mtrain.errors import ModelError
from mtrain.storage.atomic import verify_folder
from tortures.training import Outcome


def flipped_bytes(run: Path, tries: int, seed: int = 2) -> Outcome:
    """Flip a byte of any file of a checkpoint or a model folder, or cut the file there."""
    draw, corrupt = random.Random(seed), 0
    checkpoint, model = checkpoint_folders(run)[-1], run / "model"
    files = [(checkpoint, file) for file in sorted(checkpoint.iterdir())]
    files += [(model, file) for file in sorted(model.rglob("*")) if file.is_file()]
    for number in range(tries):
        folder, file = files[number % len(files)]
        before = file.read_bytes()
        at = draw.randrange(len(before))
        rest = b"" if draw.random() < 0.3 else bytes([before[at] ^ draw.randint(1, 255)]) + before[at + 1 :]
        file.write_bytes(before[:at] + rest)
        try:
            verify_folder(folder, CHECKPOINT_FILES if folder == checkpoint else ["config.yaml"])
            corrupt += 1
        except ModelError:
            pass
        file.write_bytes(before)
    return Outcome("bytes flipped, files cut", tries, 0, corrupt)
