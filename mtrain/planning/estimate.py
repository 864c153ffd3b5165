"""Predicts memory and time of one device: what its optimizer steps consist of, and what they cost.

Pure functions of the config, the lengths of the training pairs and the numbers of the hardware. The costs of
a micro-batch come from `mtrain.planning.cost`; `mtrain.planning.scaling` predicts runs on several devices.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from mtrain.checkpoint.tensors import model_without_weights
from mtrain.config.schema import Config
from mtrain.config.sections.model import ModelConfig
from mtrain.errors import UsageError
from mtrain.model.build import AnyModel
from mtrain.planning import cost
from mtrain.planning.cost import FP32, Shape, TrainingDevice
from mtrain.planning.hardware import BANDWIDTH_UTILIZATION, UTILIZATION
from mtrain.training.setup.lengths import TrainingLengths
from mtrain.training.setup.micro_batch import fit_micro_batch_tokens
from mtrain.training.step.optimizer import freeze, make_optimizer

# Times that a byte of the activations is read or written outside of matrix products: it is written and read
# in the forward pass, and read in the backward pass, which writes a gradient of the same size. Assumed.
ACTIVATION_PASSES = 4
OPTIMIZER_NUMBERS = 8  # fp32 numbers that AdamW reads and writes for each parameter, with the gradient norm
MUON_PRODUCTS = 30  # FLOPs of Muon for each number of a matrix and each row of a square block of it


@dataclass(frozen=True)
class Epoch:
    """An epoch, in tokens with EOS."""

    origin: str  # of the lengths of the pairs
    pairs: int
    source_tokens: int
    target_tokens: int
    padding: float  # share of all tokens that devices process
    steps: int


@dataclass(frozen=True)
class StepCost:
    """An optimizer step, on average."""

    target_tokens: float  # of all devices, without padding
    flops: float  # forward and backward, of all devices
    micro_batches: float  # of one device
    micro_batch_tokens: int  # limit of the padded tokens of a micro-batch, on either side


class StepTime(NamedTuple):
    """Seconds of one device in an optimizer step, without communication."""

    forward_backward: float
    update: float  # of the weights


class Estimator:
    """Predicts the costs of one of `devices` devices that train a model with a complete config."""

    def __init__(
        self,
        config: Config,
        architecture: ModelConfig,
        lengths: TrainingLengths,
        device: TrainingDevice,
        devices: int = 1,
    ):
        self.training, self.architecture = config.training, architecture
        self.lengths = lengths
        self.device, self.devices = device, devices
        self.parameters = cost.count_parameters(architecture)
        self.copies = 2 if self.training.r_drop else 1  # of each micro-batch
        self.longest = self.max_length = config.longest_sequence  # in tokens
        if lengths.is_complete and not (config.data.changes_pairs or config.model.is_classifier):
            self.longest = int(max(lengths.source.max(), lengths.target.max()))
        self.micro_batch_tokens = self._choose_micro_batch_tokens()
        self.plan = lengths.plan(self.training.batch_tokens, self.micro_batch_tokens, devices, device.workers)
        self.shapes = self._shapes()
        if not self.shapes:
            cure = "give fewer devices, or raise training.batch_tokens"
            raise UsageError(f"no step has as many pairs as there are devices ({devices}); {cure}")

    def _choose_micro_batch_tokens(self) -> int:
        """Choose as training does, but with formulas instead of measured activations."""
        limit = self.training.micro_batch_limit
        hardware, workers = self.device.hardware, self.device.workers
        if self.training.micro_batch_tokens != "auto":
            return limit
        small, large = (self._activation_bytes(self._longest_shape(pairs)) for pairs in (2, 4))
        memory, on_cpu = hardware.memory, hardware.on_cpu
        return fit_micro_batch_tokens(small, large, self.longest, limit, memory, workers, on_cpu)

    def _shapes(self) -> Counter[Shape]:
        """The shapes of the micro-batches of this device."""
        source, target = self.lengths.source, self.lengths.target
        batches = filter(len, chain.from_iterable(self.plan.steps))
        sizes = ((len(rows), int(source[rows].max()), int(target[rows].max())) for rows in batches)
        return Counter(Shape.of_lengths(*size).repeated(self.copies) for size in sizes)

    def _largest_possible(self, micro_batch_tokens: int) -> Shape:
        """The largest micro-batch of the longest sentences: a step is divided among devices and workers."""
        share = -(-self.training.batch_tokens // (self.devices * self.device.workers))
        return self._longest_shape(max(1, min(micro_batch_tokens, share) // self.longest))

    def _longest_shape(self, pairs: int) -> Shape:
        return Shape.of_lengths(pairs, self.longest, self.longest).repeated(self.copies)

    def _activation_bytes(self, shape: Shape) -> int:
        return cost.activation_bytes(self.architecture, shape, self.device)

    @cached_property
    def trained_parameters(self) -> int:
        """The number of parameters that `training.freeze` leaves. Raises UsageError if there are none."""
        return sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)

    @cached_property
    def _model(self) -> AnyModel:
        """The model without weights. Raises UsageError if `training.freeze` leaves nothing to train."""
        model = model_without_weights(self.architecture)
        freeze(model, self.training.freeze)
        return model

    # ------------------------------------------------------------------------------------------------- memory

    def memory(self) -> dict[str, int]:
        """Peak memory in bytes, of each part and in total, with the largest micro-batch; see `memory_of`."""
        candidates = list(self.shapes)
        if not self.lengths.is_complete:  # other pairs may be as long as is possible
            candidates.append(self._largest_possible(self.micro_batch_tokens))
        return max(map(self.memory_of, candidates), key=lambda memory: memory["total"])

    def memory_of(self, shape: Shape) -> dict[str, int]:
        """Peak memory in bytes, of each part and in total, with a micro-batch of a shape.

        `average` is the averaged weights (`training.ema_decay`). `logits` includes the gradients that the
        loss computes early.
        """
        workers, weights = self.device.workers, FP32 * self.parameters["total"]
        trained, loss = FP32 * self.trained_parameters, cost.loss_gradient_bytes(self.architecture, shape)
        workspace = cost.loss_workspace_bytes(self.architecture, shape, self.device)
        parts = {
            "weights": weights,
            "gradients": trained * workers,
            "optimizer": 2 * trained,  # Muon has one moment, but needs memory for its products
            "average": 0 if self.training.ema_decay is None else weights,
            "activations": workers * (self._activation_bytes(shape) - loss),
            "logits": workers * (loss + workspace),
        }
        return {**parts, "total": sum(parts.values())}

    def fits(self, memory: dict[str, int]) -> bool:
        """Whether the device has as much memory as that."""
        return memory["total"] <= self.device.hardware.usable_memory

    def largest_fitting_micro_batch(self) -> int | None:
        """Halve the tokens of the micro-batch until it fits in memory. None if not even a single sentence of
        `data.max_length` fits."""
        tokens = self.micro_batch_tokens // 2
        while tokens >= self.max_length:
            if self.fits(self.memory_of(self._largest_possible(tokens))):
                return tokens
            tokens //= 2
        return None

    # --------------------------------------------------------------------------------------------------- time

    def epoch(self) -> Epoch:
        """What an epoch consists of."""
        lengths, plan = self.lengths, self.plan
        source, target = (round(tokens / lengths.share) for tokens in plan.tokens)
        pairs = round(float(lengths.weights.sum()) / lengths.share)
        steps = lengths.steps_in_epoch(plan)
        return Epoch(lengths.origin, pairs, source, target, plan.padding.both, steps)

    def step(self) -> StepCost:
        """What an optimizer step consists of."""
        tokens, micro_batches = self.plan.tokens[1] / len(self.plan.steps), self._per_step(lambda _: 1)
        return StepCost(tokens, self._flops() * self.devices, micro_batches, self.micro_batch_tokens)

    def _per_step(self, cost_of: Callable[[Shape], float]) -> float:
        """The mean cost of the micro-batches of a step of one device, by their shapes."""
        return sum(cost_of(shape) * times for shape, times in self.shapes.items()) / len(self.plan.steps)

    def _flops(self) -> float:
        return self._per_step(lambda shape: cost.flops_of(self.architecture, shape))

    def time(self) -> StepTime:
        """The time of a step, by the rates of the hardware: matrix products at a part of its peak, everything
        else at a part of the bandwidth of its memory.
        """
        hardware = self.device.hardware
        bandwidth = BANDWIDTH_UTILIZATION * hardware.bandwidth
        moved = ACTIVATION_PASSES * self._per_step(self._activation_bytes)
        products = self._flops() / (UTILIZATION * hardware.flops(self.device.product_bytes))
        update = OPTIMIZER_NUMBERS * FP32 * self.trained_parameters / bandwidth
        if self.training.optimizer == "muon":
            update += self._muon_flops() / (UTILIZATION * hardware.flops(self.device.product_bytes))
        return StepTime(products + moved / bandwidth, update)

    def _muon_flops(self) -> float:
        """Those of making all matrices orthogonal, if they consist of square blocks."""
        groups = make_optimizer(self._model, self.training).param_groups
        matrices = [parameter for group in groups if group["uses_muon"] for parameter in group["params"]]
        numbers = float(sum(matrix.numel() for matrix in matrices))
        return MUON_PRODUCTS * self.architecture.d_model * numbers
