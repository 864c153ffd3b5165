"""A worker process that decodes batches for its parent process.

It is started with `subprocess` and receives its models and tasks through a pipe, as JSON and safetensors.
`multiprocessing` and `concurrent.futures` would import the user's main module in it and keep references to
the models.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch
from safetensors.torch import load as load_weights
from safetensors.torch import save as save_weights

from mtrain import errors
from mtrain.checkpoint.tensors import model_without_weights
from mtrain.config.decoding import DecodingConfig
from mtrain.config.model import ModelConfig
from mtrain.decoding.decode import Models, decode_batch, for_decoding
from mtrain.decoding.split import Part
from mtrain.decoding.translation import Translation
from mtrain.device import keep_freed_memory
from mtrain.tokenizer.tokenizer import Tokenizer

_IDLE = 60.0  # seconds without a task after which a worker process ends
# Run with -P, so that no file of the working directory is imported in place of a module.
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from mtrain.decoding.worker_process import serve; serve()"
)


class WorkerEndedError(Exception):
    """The process has ended, or never started."""


class WorkerProcess:
    """The parent's side of a worker process."""

    def __init__(self, threads: int):
        """Start the process, which then imports PyTorch; its operations will use `threads` threads. Raises
        OSError if no process can be started."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("this program is not run by a Python interpreter")
        self.threads = threads
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # only the parent handles Ctrl-C
        )

    def prepare(self, models: Models, precision: str) -> None:
        """Send the models, and wait until the process is ready. Raises WorkerEndedError."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            _write(stdin, sys.path)
            _write(stdin, {"threads": self.threads, "precision": precision})
            _write_models(stdin, models)
        except (OSError, ValueError) as error:
            raise WorkerEndedError from error
        self._receive()

    def decode(
        self, config: DecodingConfig, parts: Sequence[Part], n_best: int, alignments: bool, scored: bool
    ) -> list[list[Translation]]:
        """Run `decode_batch` in the process, and raise its errors here. Raises WorkerEndedError."""
        assert self.process.stdin is not None
        task = [config.model_dump(mode="json"), parts, n_best, alignments, scored]
        try:
            _write(self.process.stdin, task)
        except (OSError, ValueError) as error:
            raise WorkerEndedError from error
        answer = self._receive()
        if "error" in answer:
            builtin = MemoryError if answer["kind"] == "MemoryError" else RuntimeError
            raise getattr(errors, answer["kind"], builtin)(answer["error"])
        return [[_translation(**one) for one in of_part] for of_part in answer["translations"]]

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        try:
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:  # an empty line is not valid JSON
            raise WorkerEndedError from error
        return answer

    def kill(self, patience: float = 0.0) -> int:
        """Kill the process, unless it ends within `patience` seconds, and close the pipes. Returns its exit
        code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unread data cannot be flushed
                pipe.close()
        return code


def _translation(alignment: list[list[int]] | None, n_best: object, **fields: Any) -> Translation:
    """A translation from its fields as decoded from JSON."""
    links = None if alignment is None else tuple((source, target) for source, target in alignment)
    return Translation(alignment=links, **fields)


def _write(pipe: IO[bytes], value: object) -> None:
    pipe.write(json.dumps(value).encode() + b"\n")
    pipe.flush()


def _write_models(pipe: IO[bytes], models: Models) -> None:
    files = {file.name: b64encode(file.read_bytes()).decode() for file in models.tokenizer.files}
    configs = [model.config.model_dump(mode="json") for model in models.models]
    _write(pipe, {"tokenizer": files, "target_lang": models.target_lang, "models": configs})
    for model in models.models:
        weights = save_weights({name: x.contiguous() for name, x in model.state_dict().items()})
        _write(pipe, len(weights))
        pipe.write(weights)
        pipe.flush()


def _read_models(pipe: IO[bytes]) -> Models:
    given = json.loads(pipe.readline())
    with TemporaryDirectory() as folder:
        for name, contents in given["tokenizer"].items():
            (Path(folder) / name).write_bytes(b64decode(contents))
        tokenizer = Tokenizer(Path(folder))
    models = []
    for config in given["models"]:
        weights = load_weights(pipe.read(json.loads(pipe.readline())))
        model = model_without_weights(ModelConfig(**config)).eval()
        model.load_state_dict(weights, assign=True)
        model.make_positions()
        models.append(model.to(next(iter(weights.values())).dtype))
    return Models(models, tokenizer, given["target_lang"], torch.device("cpu"))


def serve() -> None:
    """The worker process: receive the models, then decode a batch for each task until the pipe is closed."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else must write to the pipe
    last_used = [math.inf]  # in use
    threading.Thread(target=_end_when_idle, args=(last_used,), daemon=True).start()
    keep_freed_memory()
    with suppress(OSError):  # the parent has ended
        settings = json.loads(tasks.readline())
        torch.set_num_threads(settings["threads"])
        models = for_decoding(_read_models(tasks), settings["precision"])
        _write(answers, {"ready": True})
        last_used[0] = time.monotonic()
        for line in tasks:
            last_used[0] = math.inf
            _write(answers, _answer(models, *json.loads(line)))
            last_used[0] = time.monotonic()


def _answer(models: Models, config: dict[str, Any], parts: list[list[Any]], *wanted: Any) -> dict[str, Any]:
    """The translations of a task, or its error."""
    try:
        found = decode_batch(models, DecodingConfig(**config), [Part(*part) for part in parts], *wanted)
    except Exception as error:
        return {"error": str(error) or type(error).__name__, "kind": type(error).__name__}
    return {"translations": [[asdict(one) for one in of_part] for of_part in found]}


def _end_when_idle(last_used: list[float]) -> None:
    while time.monotonic() - last_used[0] < _IDLE:
        time.sleep(1)
    os._exit(0)
