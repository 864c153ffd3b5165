"""`mtrain plan`: predicts the memory, FLOPs, communication and hours of a run before it starts."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mtrain.config.choices import Choice
from mtrain.config.recipe import assumed_speed
from mtrain.config.schema import Config
from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.presets import SIZES
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.loader import StepInput
from mtrain.data.prepare import open_data
from mtrain.data.preparing.inputs import check_corpora
from mtrain.data.reading.digests import RawFiles
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import DataFolder
from mtrain.device import (
    default_worker_count,
    keep_freed_memory,
    let_cuda_memory_grow,
    limit_onednn_cache,
    make_current,
    resolve_device,
    resolve_precision,
)
from mtrain.errors import ModelError, StorageError
from mtrain.kernels.reproducible import fix_workspaces
from mtrain.planning.cost import FP32, TrainingDevice
from mtrain.planning.estimate import Epoch, Estimator, StepCost, StepTime
from mtrain.planning.hardware import GPUS, HEAP, LIBRARIES, MEASURED, Hardware, find_hardware
from mtrain.planning.random_steps import random_steps
from mtrain.planning.scaling import Run, Work, predict_run
from mtrain.tokenizer.tokenizer import Tokenizer, model_config
from mtrain.training.setup.complete import (
    choose_values,
    is_incomplete,
    log_choices,
    make_workload,
    smallest_sizes,
)
from mtrain.training.setup.lengths import TrainingLengths
from mtrain.training.setup.resolve import resolve_config
from mtrain.training.setup.timing import Speed, measure_speed
from mtrain.training.setup.tokenizer import existing_tokenizer, vocab_size_choice, vocab_size_is_automatic
from mtrain.training.step.learner import Learner

log = logging.getLogger(__name__)

POOR = 0.8  # efficiency below which communication is worth reducing


@dataclass(frozen=True)
class Plan:
    """What `mtrain plan` predicts. Sizes are in bytes."""

    hardware: str
    devices: int
    precision: str
    model: dict[str, int]
    parameters: dict[str, int]
    epoch: Epoch
    step: StepCost
    memory: dict[str, int]
    device_memory: float
    usable_memory: float  # of a device, for tensors
    process_memory: float | None  # resident at peak, on a CPU, with libraries and the gaps of the heap
    fits: bool
    runs: list[Run]  # one for each kind of link; empty if steps were to be timed but do not fit in memory
    advice: list[str]


def plan(config: Config, hardware: str = "measured", devices: int = 1, price: float | None = None) -> Plan:
    """Plan a run on `devices` devices of a kind (see `find_hardware`), each of which costs `price` an hour.

    Nothing is written. The lengths of the training pairs come from the encoded corpus if there is one,
    else from a sample of the text. Raises the errors of `mtrain.errors`.
    """
    let_cuda_memory_grow()  # as in `fit`; now, because the next line may initialize CUDA
    data, device = config.data, find_hardware(hardware)
    folder = DataFolder.of_run(data, Path(config.run_dir))
    check_corpora(data, folder)
    scanner = CorpusScanner(RawFiles(data), config.seed, strict=False)
    speed = assumed_speed("cpu" if device.on_cpu else "cuda", devices)
    automatic = vocab_size_is_automatic(config)
    config = resolve_config(config, scanner, speed=speed, load_weights=False).config
    earlier = vocab_size_choice(config) if automatic else []
    tokenizer = existing_tokenizer(config)
    lengths = _find_lengths(config, folder, scanner, tokenizer).of_examples(config.model)
    if config.training.r_drop_after:
        log.warning("training.r_drop_after is ignored; the steps before it are about twice as fast")
    if config.training.parallel == "fsdp" and devices > 1:
        log.warning("training.parallel: fsdp is ignored; each device is assumed to hold the whole model")
    planner = _Planner(device, devices, lengths, tokenizer)
    return planner.plan(planner.complete(config, earlier, speed), price)


def _find_lengths(
    config: Config, folder: DataFolder, scanner: CorpusScanner, tokenizer: Tokenizer | None
) -> TrainingLengths:
    data = None
    if tokenizer is not None and folder.is_complete:
        with suppress(ModelError, StorageError):  # it was prepared with other settings, or is damaged
            data = open_data(config.data, tokenizer, folder, config.seed, verify=False)
    if data is not None:
        average = "" if config.data.stages is None else "; an average epoch of data.stages"
        return TrainingLengths.of_data(data, config, f"encoded pairs in {folder.path}{average}")
    mixed = {
        "the shares of data.stages are": config.data.stages is not None,
        "data.temperature is": config.data.temperature is not None,
        "the weights of data.train are": any(corpus.weight != 1 for corpus in config.data.train),
    }
    if what := next((name for name, given in mixed.items() if given), None):
        log.warning("%s ignored; run `mtrain prepare` first to take this into account", what)
    return TrainingLengths.of_text(config, scanner, tokenizer)


class _Planner:
    """Plans runs on `devices` devices, with pairs of these lengths."""

    def __init__(
        self, hardware: Hardware, devices: int, lengths: TrainingLengths, tokenizer: Tokenizer | None
    ):
        self.hardware, self.devices = hardware, devices
        self.lengths, self.tokenizer = lengths, tokenizer
        self.slowdown = 1.0  # of the steps that were timed last; see `Speed`

    def complete(self, config: Config, earlier: Sequence[Choice], speed: float) -> Config:
        """The config with a value for every key. Logs what `model.preset: auto` chose, including `earlier`
        choices. `speed` is assumed before it is measured."""
        if not is_incomplete(config):
            return config
        smallest = smallest_sizes(config)

        def speed_of(sized: Config) -> Speed:
            """The total speed of all devices, without communication. Raises MemoryError if a model does not
            fit in memory, unless it is the smallest: the plan will say that not even this one fits."""
            estimator = self._estimator(sized)
            if estimator.fits(estimator.memory()):
                seconds = sum(self._time(estimator, sized))
                return Speed(estimator.step().target_tokens / seconds, self.slowdown)
            if any(getattr(sized.model, key) != size for key, size in smallest.items()):
                raise MemoryError
            return Speed(speed)

        on_cpu = self.hardware.on_cpu
        workload = make_workload(config, self.lengths, speed_of, speed, on_cpu, self.devices)
        completed, choices = choose_values(config, workload)
        log_choices([*earlier, *choices])
        return completed

    def plan(self, config: Config, price: float | None) -> Plan:
        """The plan for a complete config."""
        estimator = self._estimator(config)
        memory = estimator.memory()
        fits, runs = estimator.fits(memory), []
        if fits or self.hardware.name != MEASURED:
            work = self._work(estimator, config)
            links = self.hardware.links if self.devices > 1 else [None]
            runs = [predict_run(work, self.devices, link, price) for link in links]
        resident = LIBRARIES + HEAP * memory["total"]
        return Plan(
            hardware=self.hardware.name,
            devices=self.devices,
            precision=estimator.device.precision,
            model={key: getattr(config.model, key) for key in SIZES},
            parameters=estimator.parameters,
            epoch=estimator.epoch(),
            step=estimator.step(),
            memory=memory,
            device_memory=self.hardware.memory,
            usable_memory=self.hardware.usable_memory,
            process_memory=resident if self.hardware.on_cpu else None,
            fits=fits,
            runs=runs,
            advice=[*(() if fits else _advise_memory(estimator)), *_advise_speed(runs)],
        )

    def _estimator(self, config: Config, devices: int | None = None) -> Estimator:
        count = devices or self.devices
        device = self._device(config.training, count)
        return Estimator(config, self._architecture(config), self.lengths, device, count)

    def _architecture(self, config: Config) -> ModelConfig:
        if self.tokenizer is not None:
            return model_config(config.model, self.tokenizer, config.data.max_length)
        size, length = config.tokenizer.vocab_size, config.data.max_length
        sizes = {"source_vocab_size": size, "target_vocab_size": size, "max_positions": length}
        return ModelConfig.model_validate({**config.model.model_dump(), **sizes})

    def _device(self, training: TrainingConfig, devices: int) -> TrainingDevice:
        """How each of some devices trains: like this machine, or like a GPU with bf16."""
        if self.hardware.name in GPUS:
            chosen = "bf16" if training.precision == "auto" else training.precision
            return TrainingDevice(self.hardware, chosen)
        device = self._own_device()
        precision = resolve_precision(device, training.precision)
        return TrainingDevice(self.hardware, precision, default_worker_count(device) if devices == 1 else 1)

    def _own_device(self) -> torch.device:
        return torch.device("cpu") if self.hardware.on_cpu else resolve_device("auto")

    def _work(self, estimator: Estimator, config: Config) -> Work:
        architecture, frozen = estimator.architecture, "embeddings" in config.training.freeze
        time = alone = self._time(estimator, config)
        if self.devices > 1:
            alone = self._time(self._estimator(config, devices=1), config)
        all_gradients = FP32 * estimator.trained_parameters
        # The gradient of the source embedding is known last. As CUDA graphs, all of them are sent at the end.
        embedding = FP32 * architecture.source_vocab_size * architecture.d_model
        as_graphs = not self.hardware.on_cpu and config.training.cuda_graphs == "auto"
        last_gradient = all_gradients if as_graphs else 0 if frozen else embedding
        epoch, step = estimator.epoch(), estimator.step()
        return Work(config.training, epoch, step, time, sum(alone), all_gradients, last_gradient)

    def _time(self, estimator: Estimator, config: Config) -> StepTime:
        """The time of a step of one of the devices of an estimator, measured or predicted. The parts of a
        measured time are not known; the update counts as a part of the backward pass."""
        if self.hardware.name != MEASURED:
            return estimator.time()
        log.info("timing some training steps")
        architecture, device = estimator.architecture, self._own_device()
        fix_workspaces()  # like the next lines, as in `fit`, so that steps take as long
        make_current(device)
        keep_freed_memory()
        limit_onednn_cache()

        def steps(_: Learner) -> Iterator[StepInput]:
            lengths = self.lengths.source, self.lengths.target
            return random_steps(architecture, lengths, estimator.plan, device)

        is_alone = estimator.devices == 1
        speed = measure_speed(architecture, config.training, device, steps, is_alone)
        self.slowdown = speed.slowdown
        return StepTime(estimator.step().target_tokens / speed.now, 0.0)


def _advise_memory(estimator: Estimator) -> Iterator[str]:
    """What to change if the memory does not suffice."""
    tokens, training = estimator.largest_fitting_micro_batch(), estimator.training
    if tokens is not None:
        yield f"set training.micro_batch_tokens to {tokens * (2 if training.r_drop else 1)}"
        return
    divides_model = training.parallel == "fsdp"
    if estimator.devices > 1 and not estimator.device.hardware.on_cpu and not divides_model:
        yield "training.parallel: fsdp may fit, as it divides the model among the devices (not predicted)"
    yield "choose a smaller model.preset: a single sentence of data.max_length does not fit"
    if training.ema_decay is not None:
        yield "set training.ema_decay to null, or use training.average_checkpoints instead"


def _advise_speed(runs: Sequence[Run]) -> Iterator[str]:
    """What to change if several devices are not much faster than one."""
    slow = [str(run.link) for run in runs if run.efficiency < POOR]
    if slow:
        names = " and ".join(slow)
        yield f"use fewer devices or raise training.batch_tokens: with {names}, each computes too little"
