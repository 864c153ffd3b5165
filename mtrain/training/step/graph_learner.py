"""Optimizer steps on a CUDA device as CUDA graphs.

The computation is the same as in `Learner`, except for what a graph requires, see `mtrain.graph_capture`:

- Shapes are fixed. A micro-batch is copied to one buffer; surplus tokens change neither loss nor gradient.
- What changes from replay to replay is in tensors: the key of dropout, 1 / tokens, the learning rate, the
  loss scale, whether to skip the update.
- A step of one micro-batch is one graph. With several micro-batches, or several ranks, each micro-batch
  replays the graph of its layout, which adds its gradients to a flat buffer. The ranks add up these buffers
  before they replay the graph of the update.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.packed_batch import AnyBatch, Layout, PackedBatch, split_batches
from mtrain.device import random_states, restore_random_states
from mtrain.distributed.ranks import Ranks
from mtrain.errors import is_out_of_memory
from mtrain.graph_capture import CaptureError, GraphPool, Work
from mtrain.kernels.foreach import add_all
from mtrain.kernels.triton.available import is_capturing
from mtrain.model.build import AnyModel
from mtrain.training.step.fixed_shapes import FixedShapes
from mtrain.training.step.learner import Learner, StepMetrics

log = logging.getLogger(__name__)

MAX_DIFFERENCE = 0.01  # of a graph's results from the results of the same work without it
ALIGNMENT = 32  # elements; the gradients of parameters start at multiples of it


class _Graph(NamedTuple):
    """What a graph computes."""

    layout: Layout | None  # of its micro-batch; None: the update by accumulated gradients
    with_update: bool
    r_drop: float  # its weight, which is a constant of the graph


class GraphLearner(Learner):
    """The learner of the only rank, or of one of several ranks, which take each step together. For several
    ranks, see `ParallelLearner`: `step` is given the batches of this rank, and the number of tokens of all.

    A graph is captured when a step first needs it, and tested against the same work without a graph. If that
    fails, training continues without graphs.
    """

    def __init__(self, model: AnyModel, training: TrainingConfig, ranks: Ranks):
        super().__init__(model, training)
        self.ranks = ranks
        if ranks.size > 1:
            with ranks.watched():
                for parameter in model.parameters():
                    dist.broadcast(parameter.detach(), src=0)
        self.shapes = FixedShapes(model.config.max_positions)
        self.uses_graphs = True  # False after a capture has failed
        self._trained = [p for p in model.parameters() if p.requires_grad]
        numbers = partial(torch.zeros, device=self.device, dtype=self._trained[0].dtype)
        self._sums, self._values = numbers(2), numbers(4)  # see StepMetrics
        self._factor = numbers(())  # 1 / target tokens of the step
        self._rate, self._encoder_rate, self._skip = (torch.zeros((), device=self.device) for _ in range(3))
        self._accumulated: list[Tensor] = []  # gradients of several micro-batches or ranks
        self._flat = numbers(0)  # the memory of all of them
        self._forget_graphs()

    def expect(self, layouts: Iterable[Layout]) -> None:
        """Choose shapes that fit micro-batches of these exact layouts, as far as memory suffices, unless
        shapes were restored."""
        if not self.shapes.source:
            self._use(self.shapes.including(layouts).within(self.max_micro_batch_positions))

    def layout_for(self, exact: Layout) -> Layout | None:
        """The layout for a micro-batch whose exact layout is given; None if it must be split, or if it needs
        other shapes than those of the graphs."""
        return self.shapes.layout_for(exact)

    def describe_shapes(self) -> list[int]:
        """See `Learner`."""
        return self.shapes.to_list()

    def restore_shapes(self, shapes: list[int]) -> None:
        """See `Learner`."""
        self._use(self.shapes.restored(shapes))

    def step(self, batches: Sequence[AnyBatch], tokens: int, rate: float) -> StepMetrics:
        """See `Learner`."""
        packed = self._prepare(batches)
        whole = len(packed) == 1 and self.ranks.size == 1
        self._rate.fill_(rate)
        self._encoder_rate.fill_(rate * self.encoder_share)
        for batch in packed:
            self._load(batch, tokens, self.draw_dropout_key())
            self.updates += whole
            self._works[_Graph(batch.layout, whole, self.r_drop)]()
        if not whole:
            for complete in [self.ranks.start_all_reduce(tensor) for tensor in (self._flat, self._sums)]:
                complete()
            self.updates += 1
            self._works[_UPDATE]()
        return StepMetrics(self._values.clone(), tokens)  # the next step overwrites them

    # Work that is captured

    def _compute(self, graph: _Graph) -> None:
        gradients = self._accumulated if graph.layout is None else self._compute_gradients(graph.layout)
        if not graph.with_update:
            add_all(self._accumulated, gradients)
            return
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = self._encoder_rate if group["is_encoder"] else self._rate
            group["capturable"] = is_capturing(self.device)
        self._values.copy_(self._apply(self._sums, self._skip))
        self._sums.zero_()
        if graph.layout is None:
            self._flat.zero_()

    def _compute_gradients(self, layout: Layout) -> list[Tensor]:
        """The gradients of the micro-batch in the buffer. Adds its loss and nll to the sums."""
        batch = PackedBatch(self._buffer[: layout.buffer_size], layout, layout, [])
        sums = self.loss_on_device(self.model, batch)
        self._sums += torch.stack([sums.loss.detach(), sums.nll])
        scaled = sums.loss * self._factor * self.loss_scaler.scale
        # Not `backward`, which would add each gradient to zeros, and leave nodes that outlive the capture.
        return [g.contiguous() for g in torch.autograd.grad(scaled, self._trained)]

    # Preparation of a step

    def _prepare(self, batches: Sequence[AnyBatch]) -> list[PackedBatch]:
        """The micro-batches of a step in the layouts of graphs that are ready. If memory of a rank runs out,
        all of them try again with smaller micro-batches; if a rank cannot capture its graphs, without any."""
        while True:
            ready = self._try_to_prepare(cast(Sequence[PackedBatch], batches))
            failed, limit, without_graphs = self.ranks.all_reduce_max(
                ready is None, -self.max_micro_batch_positions, not self.uses_graphs
            )
            if ready is not None and not failed:
                return ready
            self.uses_graphs, self.max_micro_batch_positions = not without_graphs, -limit
            self._forget_graphs()
            self.shapes = self.shapes.within(-limit)
            self._release_memory()

    def _try_to_prepare(self, batches: Sequence[PackedBatch]) -> list[PackedBatch] | None:
        """Like `_prepare`, in this process; None if memory has run out or a graph cannot be captured."""
        try:
            fitted = self._fitted(batches)
            whole = len(fitted) == 1 and self.ranks.size == 1
            graphs = [_Graph(batch.layout, whole, self.r_drop) for batch in fitted]
            if not whole:
                self._allocate_accumulated()
                graphs.append(_UPDATE)
            for graph, batch in zip(graphs, [*fitted, fitted[0]], strict=False):
                if graph not in self._works:
                    self._works[graph] = self._make(graph, batch)
        except CaptureError as error:
            log.warning("training continues without CUDA graphs: %s", error)
            self.uses_graphs = False
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            limit = self.shapes.tokens / 2
            pairs = cast(list[PackedBatch], split_batches(batches, 0))
            if self.shapes.within(limit).including(pair.exact for pair in pairs).tokens >= self.shapes.tokens:
                raise
            self._limit_micro_batches(limit, batches)
            return None
        return fitted

    def _fitted(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The batches in the layouts of graphs. The loader has already packed most of them so."""
        parts = [part for batch in batches for part in self._parts(batch)]
        self._use(self.shapes.including(part.exact for part in parts))
        layouts = [cast(Layout, self.shapes.layout_for(part.exact)) for part in parts]
        pairs = zip(parts, layouts, strict=True)
        return [part if part.layout == layout else part.in_layout(layout) for part, layout in pairs]

    def _parts(self, batch: PackedBatch) -> list[PackedBatch]:
        """The batch, in shapes that fit it, or parts of it if these would exceed the limit. Only a single
        pair may not fit the shapes then."""
        larger, limit = self.shapes.including([batch.exact]), self.max_micro_batch_positions
        if larger == self.shapes or larger.tokens <= limit:
            self._use(larger)
            return [batch]
        if not self.shapes.source:
            self._use(larger.within(limit))
        return batch.divided(self.shapes.source, self.shapes.target)

    def _use(self, shapes: FixedShapes) -> None:
        if shapes != self.shapes:
            self.shapes = shapes
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._works: dict[_Graph, Work] = {}
        self._kept: list[Tensor] = []  # what they read: a longer table of positions may replace one
        self._pool = GraphPool(self.device)  # a new one, so that the memory of the old one is freed
        self._buffer = torch.zeros(0, dtype=torch.int32, device=self.device)

    def _allocate_accumulated(self) -> None:
        if not self._accumulated:
            sizes = [p.numel() + -p.numel() % ALIGNMENT for p in self._trained]
            self._flat = self._sums.new_zeros(sum(sizes))
            parts = zip(torch.split(self._flat, sizes), self._trained, strict=True)
            self._accumulated = [part[: p.numel()].view_as(p) for part, p in parts]

    def _load(self, batch: PackedBatch, tokens: int, key: int) -> None:
        """Start copying a micro-batch to the buffer. Nothing here waits for the device."""
        self._buffer[: len(batch.buffer)].copy_(batch.buffer, non_blocking=True)
        self._factor.fill_(1 / tokens)
        if self.dropout_key is not None:
            self.dropout_key.fill_(key)

    # Graphs

    def _make(self, graph: _Graph, batch: PackedBatch) -> Work:
        """The work of a graph. Captures it, and compares it with the graph; without graphs, only finds out if
        memory suffices for it. Weights, moments and random states do not change."""
        work = partial(self._compute, graph)
        if not self.optimizer.state:
            self._allocate_moments()
        if len(self._buffer) < batch.layout.buffer_size:
            layouts = map(self.shapes.layout_of_class, range(len(self.shapes.pairs)))
            self._buffer = self._buffer.new_zeros(max(layout.buffer_size for layout in layouts))
        self._load(batch, max(1, batch.target_tokens), key=0)
        self._skip.fill_(not self.uses_graphs)
        restore = self._restorer(graph.with_update and self.uses_graphs)
        try:
            if not self.uses_graphs:
                work()
                return work
            expected = self._result(graph, partial(self._pool.run, work))
            restore()
            replay = self._pool.capture(work)
            restore()
            found = self._result(graph, replay)
        finally:
            restore()
            self._skip.zero_()
        self.captures += 1
        self._kept += self.model.buffers()
        if not torch.allclose(found, expected, rtol=MAX_DIFFERENCE, equal_nan=True):
            values = f"{found.tolist()} instead of {expected.tolist()}"
            raise CaptureError(f"a graph computes another loss, nll, gradient or update: {values}")
        return replay

    def _restorer(self, updates: bool) -> Callable[[], None]:
        """A function that restores what work changes. If it `updates` the weights, these and the moments are
        copied to host memory: the device may have no room for them."""
        states, changed = random_states(self.device), [self.loss_scaler.scale, self.loss_scaler.finite_steps]
        if updates:
            changed += [*self._trained, *chain.from_iterable(self._moments())]
        copies = [tensor.detach().to("cpu", copy=True) for tensor in changed]

        @torch.no_grad()
        def restore() -> None:
            restore_random_states(states, self.device)
            for tensor, copied in zip(changed, copies, strict=True):
                tensor.copy_(copied)
            for tensor in (self._sums, self._flat, self._values):
                tensor.zero_()

        return restore

    def _moments(self) -> list[list[Tensor]]:
        """The state of the optimizer: for each quantity, the tensors of all parameters."""
        states = self.optimizer.state.values()
        names = "step", "exp_avg", "exp_avg_sq"  # Muon has one of them
        return [[state[name] for state in states if name in state] for name in names]

    def _result(self, graph: _Graph, work: Work) -> Tensor:
        """What work computes: loss, nll and gradient norm, and after an update the norms of the weights and
        the moments. Known values replace what accumulates before an update."""
        self._rate.fill_(1)  # an update then changes the norm of the weights
        self._encoder_rate.fill_(1)
        self.loss_scaler.scale.fill_(1)  # with another one, gradients may overflow, which skips the update
        if graph.layout is None:
            self._flat.fill_(1)
            self._sums.fill_(1)
        work()
        if not graph.with_update:
            return torch.cat([self._sums, nn.utils.get_total_norm(self._accumulated)[None]])
        updated: list[Sequence[Tensor]] = [self._trained, *self._moments()]
        norms = [nn.utils.get_total_norm(tensors) for tensors in updated]
        return torch.stack([*self._values[:3], *norms]).detach()


_UPDATE = _Graph(None, True, 0.0)
