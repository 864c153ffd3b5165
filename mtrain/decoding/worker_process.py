"""A worker process that decodes batches for its parent process.

It receives its models through a pipe: other ways to share them would keep references to the models.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mtrain.checkpoint.tensors import model_without_weights
from mtrain.config.sections.model import ModelConfig
from mtrain.decoding.decode import DecodingTask, Ensemble, decode_batch, for_decoding
from mtrain.decoding.translation import Translation
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer

_IDLE = 60.0  # seconds without a task after which a worker process ends
Decode = Callable[[DecodingTask], list[list[Translation]]]


class _Weights(NamedTuple):
    """A model that another process makes again."""

    config: ModelConfig
    # The data type and the bytes of each tensor. The bytes share its memory.
    tensors: dict[str, tuple[torch.dtype, npt.NDArray[np.uint8]]]


def make_decoder(ensemble: Ensemble[Transformer], precision: str, threads: int) -> partial[Decode]:
    """Makes, in a worker process, a function like `decode_batch` that uses `threads` threads."""
    models = [_weights_of(model) for model in ensemble.models]
    # The tokenizer comes last, because nothing is read after it if it cannot be loaded.
    return partial(_prepare, models, precision, threads, ensemble.tokenizer)


def _weights_of(model: Transformer) -> _Weights:
    tensors = model.state_dict().items()
    contents = {name: (x.dtype, x.contiguous().view(torch.uint8).numpy()) for name, x in tensors}
    return _Weights(model.config, contents)


def _prepare(models: Sequence[_Weights], precision: str, threads: int, tokenizer: Tokenizer) -> Decode:
    """The function that decodes a batch in the worker process, which ends when it is idle for a while."""
    last_used = [math.inf]  # in use
    threading.Thread(target=_end_when_idle, args=(last_used,), daemon=True).start()
    torch.set_num_threads(threads)
    copies = [_make_model(weights) for weights in models]
    ensemble = for_decoding(Ensemble(copies, tokenizer, torch.device("cpu")), precision)
    last_used[0] = time.monotonic()

    def decode(task: DecodingTask) -> list[list[Translation]]:
        last_used[0] = math.inf
        try:
            return decode_batch(ensemble, task)
        finally:
            last_used[0] = time.monotonic()

    return decode


def _make_model(weights: _Weights) -> Transformer:
    model = model_without_weights(weights.config).eval()
    assert isinstance(model, Transformer)
    tensors = {name: torch.from_numpy(x).view(dtype) for name, (dtype, x) in weights.tensors.items()}
    model.load_state_dict(tensors, assign=True)
    model.embed.make_positions()
    return model.to(next(iter(tensors.values())).dtype)


def _end_when_idle(last_used: list[float]) -> None:
    while time.monotonic() - last_used[0] < _IDLE:
        time.sleep(1)
    os._exit(0)
