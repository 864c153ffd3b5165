"""The buffers and graphs of one session. Symbols in shapes: see `mtrain.decoding.sessions`."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.search.beam import Hypothesis
from mtrain.decoding.search.predictor import average_probabilities
from mtrain.decoding.sessions.inputs import Batch, Inputs, Shape
from mtrain.decoding.sessions.steps import Beam, Greedy
from mtrain.device import copy_to_host_async
from mtrain.graph_capture import CaptureError, GraphPool, Work
from mtrain.kernels.decoding_step import Allowed
from mtrain.model.incremental import Models
from mtrain.model.static_decoder import StaticDecoder

_warn_once = cache(logging.getLogger(__name__).warning)
Part = Literal["prologue", "step"]

SHRINK_FROM = 128  # rows; a step with fewer takes about as long as one with half of them
LOOK_EVERY = 5  # steps between looks at which sentences are finished: each waits for a copy of one step ago
# Rows of a step times the width of the model. In larger steps, the GPU computes longer than the host needs to
# start the operations: from about 3,000 rows of a model of width 512 on (estimated).
MAX_STATES_OF_GRAPH = 3 * 2**19
# Source tokens times the width of the model. With more, the GPU computes for about as long as the host needs
# to start the operations (estimated), and a graph would compute surplus tokens.
MAX_STATES_OF_ENCODER_GRAPH = 2**23


def bucket(number: int, least: int = 1) -> int:
    """The number rounded up to a power of two, or to one and a half of it, and at least `least`."""
    power = 1 << max(0, number - 1).bit_length()
    return max(least, power * 3 // 4 if power * 3 // 4 >= number else power)


class Session:
    """Searches batches of one shape, with one or more models and fixed settings.

    The prologue encodes the sources and resets the state; a step computes one position of all rows. Both run
    without graphs for the first batch, and are captured in `pool` at the start of the next one, unless a step
    is larger than MAX_STATES_OF_GRAPH. Sources are not padded: there is a prologue for each rounded number of
    tokens, and none of more than MAX_STATES_OF_ENCODER_GRAPH is captured. When half of the sentences are
    finished, the others are moved to the beginning of the buffers, and further steps compute only these, if
    there are at least SHRINK_FROM rows.
    """

    def __init__(self, models: Models, config: DecodingConfig, shape: Shape, pool: GraphPool):
        device, model_config = models[0].weight.device, models[0].config
        self.config, self.model_config, self.shape = config, model_config, shape
        states = shape.sentences * shape.beams * model_config.d_model
        self.pool = pool if states <= MAX_STATES_OF_GRAPH else None
        pinned = device.type == "cuda"
        self._host, self._host_ids, self._host_inputs = Inputs.of(shape, torch.device("cpu"), pinned)
        self._buffer, self.source_ids, self.inputs = Inputs.of(shape, device)
        sizes = (shape.sentences, shape.beams, shape.source, shape.positions)
        self.decoders = [StaticDecoder(model, *sizes) for model in models]
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        kind: type[Greedy | Beam] = Beam if config.samples is None and config.beam_size > 1 else Greedy
        dtype = torch.promote_types(models[0].weight.dtype, torch.float32)
        self.state = kind.empty(shape, device, dtype)
        tokens = torch.zeros(model_config.target_vocab_size, dtype=torch.bool)
        forbidden = tokens.index_fill(0, torch.tensor(config.forbidden_ids, dtype=torch.int64), True)
        self.forbidden = forbidden.to(device) if config.forbidden_ids else None
        self._work: dict[tuple[Part, int], Work] = {}  # that was run, by the arguments of `_run`
        self._captured: set[tuple[Part, int]] = set()

    @property
    def bytes(self) -> int:
        """The memory of the buffers on the device."""
        caches = [(decoder.caches, decoder.memories) for decoder in self.decoders]
        return sum(x.nbytes for x in _tensors((self._buffer, self.state, caches)))

    def search(self, batch: Batch, limits: Tensor) -> list[list[Hypothesis]]:
        """The best hypotheses of each sentence. `limits` are the maximum lengths of the translations, on the
        host."""
        self._capture()
        tokens = self._host_inputs.fill(self._host_ids, batch, limits)
        self._buffer.copy_(self._host, non_blocking=True)
        self._start(tokens)
        steps, sentences = int(limits.max()), self.shape.sentences
        order = torch.arange(len(batch.rows))  # the sentences of the batch in the order of the buffers
        ended: list[tuple[Tensor, Tensor]] = []  # results of sentences; later ones replace earlier ones
        look: Callable[[], list[float]] | None = None
        for step in range(steps):
            self._run("step", sentences)
            if look is not None:
                going = (torch.tensor(look()[: len(order)]) == 0).nonzero()[:, 0]
                look = None
                if not len(going):
                    break
                fewer = bucket(len(going))
                if 2 * fewer <= sentences and sentences * self.shape.beams >= SHRINK_FROM:
                    ended.append((order, self._results(sentences, steps, batch.n_best)))
                    self._move(going, fewer, step + 1)
                    sentences, order = fewer, order[going]
            if step % LOOK_EVERY == LOOK_EVERY - 1 and step + 2 < steps:
                look = copy_to_host_async(_first(self.state, sentences).done())
        ended.append((order, self._results(sentences, steps, batch.n_best)))
        columns = self._collected(ended, self.state.columns(steps, batch.n_best))
        return self.state.hypotheses(columns, limits, self.config, self.model_config.eos_id)

    def _start(self, tokens: int) -> None:
        """Run the prologue for a number of source tokens, which a graph has as a rounded one."""
        if self.pool is None or tokens * self.model_config.d_model > MAX_STATES_OF_ENCODER_GRAPH:
            self._make_prologue(tokens)()
        else:
            self._run("prologue", min(bucket(tokens, self.shape.source), len(self.source_ids)))

    def _run(self, part: Part, size: int) -> None:
        """The prologue for a number of source tokens, or a step of the first sentences."""
        if (part, size) not in self._work:
            make = self._make_step if part == "step" else self._make_prologue
            self._work[part, size] = make(size)
        self._work[part, size]()

    # The work that the next two functions return does not refer to `self`, which would be a cycle: memory is
    # freed at once.

    def _make_prologue(self, tokens: int) -> Work:
        decoders, inputs, state, bos_id = self.decoders, self.inputs, self.state, self.model_config.bos_id
        ids, longest, position = self.source_ids[:tokens], self.shape.source, self.position

        def work() -> None:
            sources = inputs.sources(tokens, longest)
            for decoder in decoders:
                decoder.encode(ids, sources)
            position.zero_()
            state.reset(inputs, bos_id)

        return work

    def _make_step(self, sentences: int) -> Work:
        decoders, position, config = self.decoders, self.position, self.config
        inputs, state = _first(self.inputs, sentences), _first(self.state, sentences)
        prefixes = inputs.prefixes if self.shape.prefixed else None
        allowed = Allowed(position, inputs.min_lengths, self.model_config.eos_id, self.forbidden, prefixes)

        def work() -> None:
            arguments = state.last, state.past_keep, position, inputs.spans
            logits = [decoder.decode_next(*arguments) for decoder in decoders]
            state.step(average_probabilities(logits), inputs, allowed, config)
            position.add_(1)

        return work

    def _capture(self) -> None:
        """Capture the work that was run. Its warm-ups change the state, which the prologue resets."""
        if self.pool is None or not (new := self._work.keys() - self._captured):
            return
        self._buffer.copy_(self._host, non_blocking=True)  # of the last batch, before sentences were moved
        try:
            with self.pool.prepared():
                for key in new:
                    self.position.zero_()
                    self._work[key] = self.pool.capture(self._work[key])
        except CaptureError as error:
            self.pool = None
            _warn_once(f"decoding continues without CUDA graphs: {error}")
        self._captured |= new

    def _move(self, going: Tensor, sentences: int, positions: int) -> None:
        """Move the sentences at the indices `going` to the beginning; further copies of one of them make up
        the given number of sentences."""
        device = self.position.device
        index = torch.full((sentences,), int(going[0]), pin_memory=device.type == "cuda")
        index[: len(going)] = going
        index = index.to(device, non_blocking=True)
        for decoder in self.decoders:
            decoder.move(index, positions)
        for x in _tensors((self.inputs, self.state)):
            x[:sentences] = x[index]

    def _results(self, sentences: int, steps: int, n_best: int | None) -> Tensor:
        """The columns of the results of the first sentences, as one matrix, so that the host waits once."""
        columns = _first(self.state, sentences).columns(steps, n_best)
        return torch.cat([column.flatten(1).double() for column in columns], dim=1)

    def _collected(self, ended: Sequence[tuple[Tensor, Tensor]], columns: Sequence[Tensor]) -> list[Tensor]:
        """The columns of the results of all sentences, on the host, of these shapes and types. A sentence has
        its last results."""
        joined = torch.cat([matrix for _, matrix in ended]).cpu()
        matrices = torch.split(joined, [len(matrix) for _, matrix in ended])
        found = matrices[0][: len(ended[0][0])]
        for (order, _), matrix in zip(ended[1:], matrices[1:], strict=True):
            found[order] = matrix[: len(order)]
        parts = torch.split(found, [math.prod(column.shape[1:]) for column in columns], dim=1)
        pairs = zip(parts, columns, strict=True)
        return [part.reshape(len(part), *column.shape[1:]).to(column.dtype) for part, column in pairs]


def _tensors(x: Any) -> list[Tensor]:
    """The tensors in nested tuples and lists."""
    if x is None or isinstance(x, Tensor):
        return [] if x is None else [x]
    return [tensor for part in x for tensor in _tensors(part)]


def _first(x: Any, sentences: int) -> Any:
    """Views of the first sentences of the tensors in nested named tuples."""
    if x is None or isinstance(x, Tensor):
        return None if x is None else x[:sentences]
    return type(x)(*(_first(part, sentences) for part in x))
