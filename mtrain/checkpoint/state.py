"""The progress of training, as a checkpoint records it in `state.json`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from mtrain.data.epochs.schedule import Position

# The `validation_fingerprint` if the weights lack the alignment head of the model; it equals no other.
NO_HEAD = "no alignment head"


@dataclass(frozen=True)
class Plan:
    """How a run with `max_minutes` continues after step `step`, by the clock; see `mtrain.training.clock`."""

    step: int
    scheduled: float  # share of the schedule that it has reached; the rest is spread evenly
    total_steps: int  # after which the run ends
    next_validation: int  # the first step that may be validated
    limits: tuple[float, int | None]  # max_minutes, and the steps that other limits allow
    validation_steps: float | None = None  # that take as long as the last validation, if that is known

    @property
    def has_all_steps(self) -> bool:
        """Whether the plan has all the steps that other limits allow."""
        return self.limits[1] is not None and self.total_steps >= self.limits[1]

    def scheduled_at(self, step: int) -> float:
        """The share of the schedule that a step of the run has reached."""
        share = min(1.0, (step - self.step) / max(1, self.total_steps - self.step))
        return self.scheduled + share * (1 - self.scheduled)


@dataclass
class TrainState:
    """The progress of training. Together with weights and optimizer, it is all that resuming requires.

    During training, the fields from `loss_scale` on, except the numbers of skipped steps, have the values of
    the checkpoint that the run was resumed from; `Saver` brings them up to date in what it saves.
    """

    step: int = 0  # optimizer steps taken
    position: Position = field(default_factory=Position)  # of the next step in the training data
    window_layout: tuple[int, int] = (1, 1)  # what determines the windows of an epoch; by default, one window
    batch_order: int = 0  # version of the order of batches; see mtrain.data.epochs.batching
    target_tokens_seen: int = 0
    seconds: float = 0.0  # of training and validation
    steps_in_first_epoch: int | None = None
    data_since: tuple[int, int] | None = None  # step and complete epochs when the data changed; None: never
    micro_batch_tokens: int | None = None
    plan: Plan | None = None  # of a run with `planned_steps`
    validation_due: bool = False  # saved before the validation of this step
    validations_without_improvement: int = 0
    best_step: int | None = None
    best_metric: str | None = None  # that has selected this step; None in states of earlier versions
    best_score: float | None = None  # instead of `best_scores` in states of earlier versions
    best_scores: dict[str, float] = field(default_factory=dict)  # of all metrics
    best_alignment_layer: int | None = None  # decoder layer from which the best model takes word alignments
    lowest_nll: float | None = None  # of all validations, rounded
    initial_score: float | None = None  # instead of `initial_scores` in states of earlier versions
    initial_scores: dict[str, float] = field(default_factory=dict)  # of training.init_from
    data_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    validation_fingerprint: str = ""  # see Validator.fingerprint
    loss_scale: list[float] = field(default_factory=list)  # of fp16
    max_micro_batch_positions: float | None = None  # to which they were limited when memory ran out
    fixed_shapes: list[int] = field(default_factory=list)  # of micro-batches in CUDA graphs
    arithmetic: str = ""  # what determines the exact results of a step: device, precision, versions
    skipped_steps: int = 0  # because of NaN or infinity
    skipped_in_a_row: int = 0
    metric_sums: dict[str, float] = field(default_factory=dict)  # since the last line of metrics.jsonl
    rng: dict[str, str] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self.position.epoch

    def outcome_of_validation(self) -> dict[str, Any]:
        """The fields that a validation changes, and its step, by name."""
        return {name: getattr(self, name) for name in _VALIDATION_FIELDS}

    def adopt_validation(self, outcome: Mapping[str, Any]) -> None:
        """Adopt the `outcome_of_validation` of another state."""
        for name in _VALIDATION_FIELDS:
            setattr(self, name, outcome[name])

    def to_json(self) -> dict[str, Any]:
        """The contents of `state.json`."""
        values = asdict(self)
        values.update(zip(_POSITION_KEYS, values.pop("position"), strict=True))
        values["window"] = values.pop("metric_sums")
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TrainState":
        """The state with the contents of `state.json`, some of which earlier versions did not write. Raises
        ValueError or TypeError."""
        known = {**cls().to_json(), **values}
        known["position"] = dict(zip(Position._fields, map(known.pop, _POSITION_KEYS), strict=True))
        known["metric_sums"] = known.pop("window")
        return _ADAPTER.validate_python(known)


_ADAPTER = TypeAdapter(TrainState)
# The keys of `state.json` for the fields of a `Position`.
_POSITION_KEYS = ("epoch", "epoch_window", "next_batch", "stage_starts", "stage_step")
_VALIDATION_FIELDS = (
    "step", "seconds", "best_step", "best_metric", "best_score", "best_scores", "lowest_nll",
    "best_alignment_layer", "validations_without_improvement", "validation_due",
)  # fmt: skip
