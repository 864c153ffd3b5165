"""A worker process that decodes batches for its parent process.

It receives its models and tasks through a pipe, as JSON and safetensors: other ways to share them would keep
references to the models.
"""

import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load as load_weights
from safetensors.torch import save as save_weights

from mtrain.checkpoint.tensors import model_without_weights
from mtrain.config.model import ModelConfig
from mtrain.decoding.decode import DecodingEnsemble, Ensemble, decode_batch, for_decoding
from mtrain.decoding.task import DecodingTask
from mtrain.decoding.translation import Translation, from_fields, to_fields
from mtrain.device import keep_freed_memory
from mtrain.model.transformer import Transformer
from mtrain.processes import WorkerProcess
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.worker_messages import Answer, Message, Receive
from mtrain.worker_messages import serve as serve_tasks

_IDLE = 60.0  # seconds without a task after which a worker process ends


def start_process(threads: int) -> WorkerProcess:
    """Start a process, which then imports PyTorch; its operations will use `threads` threads. Raises OSError
    if no process can be started."""
    return WorkerProcess(__name__, threads)


def messages_of(ensemble: Ensemble[Transformer], precision: str, threads: int) -> Iterator[Message]:
    """What `WorkerProcess.prepare` sends. The weights of one model at a time are copied."""
    files = ensemble.tokenizer.files
    header: dict[str, Any] = {"threads": threads, "precision": precision}
    header |= {"tokenizer": [file.name for file in files], "models": len(ensemble.models)}
    yield Message(header, tuple(file.read_bytes() for file in files))
    for model in ensemble.models:
        weights = save_weights({name: x.contiguous() for name, x in model.state_dict().items()})
        yield Message(model.config.model_dump(mode="json"), (weights,))


def decode_remotely(process: WorkerProcess, task: DecodingTask) -> list[list[Translation]]:
    """Run `decode_batch` in a process, and raise its errors here. Raises WorkerEndedError."""
    answer = process.call(Message(task.to_fields()))
    return from_fields(answer.header["translations"])


def serve() -> None:
    """The worker process: receive the models, then decode a batch for each task until the pipe is closed."""
    keep_freed_memory()
    serve_tasks(_prepare)


def _prepare(receive: Receive) -> Answer:
    last_used = [math.inf]  # in use
    threading.Thread(target=_end_when_idle, args=(last_used,), daemon=True).start()
    ensemble = _receive_models(receive)
    last_used[0] = time.monotonic()

    def answer(task: Message) -> Message:
        last_used[0] = math.inf
        try:
            found = decode_batch(ensemble, DecodingTask.from_fields(task.header))
            return Message({"translations": to_fields(found)})
        finally:
            last_used[0] = time.monotonic()

    return answer


def _receive_models(receive: Receive) -> DecodingEnsemble:
    header, files = receive()
    torch.set_num_threads(header["threads"])
    with TemporaryDirectory() as folder:
        for name, contents in zip(header["tokenizer"], files, strict=True):
            (Path(folder) / name).write_bytes(contents)
        tokenizer = Tokenizer(Path(folder))
    models = []
    for _ in range(header["models"]):
        config, (contents,) = receive()
        weights = load_weights(contents)
        model = model_without_weights(ModelConfig(**config)).eval()
        assert isinstance(model, Transformer)
        model.load_state_dict(weights, assign=True)
        model.embed.make_positions()
        models.append(model.to(next(iter(weights.values())).dtype))
    return for_decoding(Ensemble(models, tokenizer, torch.device("cpu")), header["precision"])


def _end_when_idle(last_used: list[float]) -> None:
    while time.monotonic() - last_used[0] < _IDLE:
        time.sleep(1)
    os._exit(0)
