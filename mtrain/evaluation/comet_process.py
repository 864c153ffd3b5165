"""Scores translations with COMET: a program for the Python of an environment that has `unbabel-comet`.

Arguments: the name of a model on the Hugging Face Hub or the path of a checkpoint (.ckpt), and the number of
GPUs, or `auto` for one if there is one. All lines of stdin and stdout are JSON. The first line of stdout is
the version of COMET. Each line of stdin is a list of sentences as COMET takes them,
`{"src": ..., "mt": ..., "ref": ...}`; the list of their scores follows on stdout. The program ends with its
stdin.

It imports nothing from mtrain, which is not installed there.
"""

import json
import logging
import os
import sys
import warnings
from typing import Any


def main() -> None:
    """Answer lists of sentences until stdin ends."""
    name, gpus = sys.argv[1:]
    # Libraries print to stdout. Their output goes to stderr, so that stdout has scores only.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        model, version, devices = _load(name, gpus)
        accelerator = "cpu" if not devices else "auto" if gpus == "auto" else "gpu"  # an error without one
        print(json.dumps(version), file=out, flush=True)
        options = {"batch_size": 16, "gpus": devices, "accelerator": accelerator, "progress_bar": False}
        for line in sys.stdin.buffer:
            predicted = model.predict(json.loads(line), **options)
            print(json.dumps([float(score) for score in predicted.scores]), file=out, flush=True)


def _load(name: str, gpus: str) -> tuple[Any, str, int]:
    """The model, the version of COMET, and the number of GPUs to use."""
    logging.disable(logging.WARNING)  # PyTorch Lightning logs the hardware and advice for each group
    warnings.simplefilter("ignore")
    import comet
    import torch

    path = name if name.endswith(".ckpt") else comet.download_model(name)
    devices = int(torch.cuda.is_available()) if gpus == "auto" else int(gpus)
    return comet.load_from_checkpoint(path), comet.__version__, devices


if __name__ == "__main__":
    main()
