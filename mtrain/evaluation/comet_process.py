"""Scores translations with COMET: a program for the Python of an environment that has `unbabel-comet`.

Arguments: the name of a model on the Hugging Face Hub or the path of a checkpoint (.ckpt), and the number of
GPUs, or `auto` for one if there is one. The first line of stdout is `{"version": VERSION}`. Each line of
stdin is `{"source": ..., "translation": ..., "reference": ...}`. An empty line ends a group, whose scores
follow on stdout as one line `{"score": NUMBER}` for each sentence, in order. The program ends with its stdin.

It imports nothing from mtrain, which is not installed there.
"""

import json
import logging
import os
import sys
import warnings
from typing import IO, Any


def main() -> None:
    """Answer groups of sentences until stdin ends."""
    name, gpus = sys.argv[1:]
    # Libraries print to stdout. Their output goes to stderr, so that stdout has scores only.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        model, version, devices = _load(name, gpus)
        accelerator = "cpu" if not devices else "auto" if gpus == "auto" else "gpu"  # an error without one
        _write([{"version": version}], out)
        group: list[dict[str, str]] = []
        for line in sys.stdin.buffer:
            if line.strip():
                group.append(json.loads(line))
            else:
                _write([{"score": score} for score in _scores(model, group, devices, accelerator)], out)
                group = []


def _load(name: str, gpus: str) -> tuple[Any, str, int]:
    """The model, the version of COMET, and the number of GPUs to use."""
    logging.disable(logging.WARNING)  # PyTorch Lightning logs the hardware and advice for each group
    warnings.simplefilter("ignore")
    import comet
    import torch

    path = name if name.endswith(".ckpt") else comet.download_model(name)
    devices = int(torch.cuda.is_available()) if gpus == "auto" else int(gpus)
    return comet.load_from_checkpoint(path), comet.__version__, devices


def _scores(model: Any, group: list[dict[str, str]], gpus: int, accelerator: str) -> list[float]:
    samples = [{"src": s["source"], "mt": s["translation"], "ref": s["reference"]} for s in group]
    predicted = model.predict(samples, batch_size=16, gpus=gpus, accelerator=accelerator, progress_bar=False)
    return [float(score) for score in predicted.scores]


def _write(objects: list[dict[str, Any]], out: IO[str]) -> None:
    out.writelines(json.dumps(item) + "\n" for item in objects)
    out.flush()


if __name__ == "__main__":
    main()
