"""Checkpoints, from which training goes on: safetensors and JSON, nothing is ever pickled."""

import json
import logging
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mtrain.errors import ModelError, StorageError
from mtrain.storage.atomic import write_atomically, write_folder, write_text
from mtrain.storage.manifest import read_json, verify_folder

log = logging.getLogger(__name__)

CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@dataclass
class TrainState:
    """Where training stands; with weights and optimizer, all that a continued run needs."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    next_batch: int = 0  # steps of this epoch done
    batch_order: int = 0  # version of the order of batches; see mtrain.data.batching
    target_tokens_seen: int = 0
    seconds: float = 0.0  # of training and validation
    best_step: int | None = None
    best_score: float | None = None
    validations_without_improvement: int = 0
    skipped_steps: int = 0  # for NaN or infinity
    skipped_in_a_row: int = 0
    arithmetic: str = ""  # with which a continued run is the same bit for bit
    tokenizer_fingerprint: str = ""
    validation_fingerprint: str = ""  # of what the best score was measured on and how
    loss_scale: list[float] = field(default_factory=list)  # of fp16
    window: dict[str, float] = field(default_factory=dict)  # sums since the last line of metrics.jsonl
    data_fingerprint: str = ""
    rng: dict[str, str] = field(default_factory=dict)


def load_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. Raises ModelError if it cannot be read."""
    try:
        return load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{file}: cannot read: {error}") from None


def load_weights(model: nn.Module, file: Path) -> None:
    """Put the tensors of a safetensors file into a model, in the place of its own if those are on the meta
    device. Raises ModelError naming what does not fit, before memory is taken for any."""
    own = model.state_dict()
    try:
        with safe_open(file, "pt") as stored:
            shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
            if shapes.keys() != own.keys():
                missing, extra = (sorted(x) or "none" for x in (own.keys() - shapes, shapes.keys() - own))
                raise ModelError(f"{file}: tensors missing: {missing}; not expected: {extra}")
            for name, shape in shapes.items():
                if shape != list(own[name].shape):
                    raise ModelError(f"{file}: {name} is {shape}; the model has {list(own[name].shape)}")
            tensors = {name: stored.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{file}: cannot read: {error}") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ModelError(f"{file}: {name} holds NaN, infinity or integers")
        tensors[name] = tensor.to(own[name].dtype)
    model.load_state_dict(tensors, assign=any(tensor.is_meta for tensor in own.values()))


def checkpoint_folders(run_dir: Path, every: int = 1) -> list[Path]:
    """Checkpoints of a run at multiples of `every` steps, oldest first."""
    found = (run_dir / "checkpoints").glob("step-" + "[0-9]" * 8)
    return sorted(path for path in found if path.is_dir() and int(path.name[5:]) % every == 0)


def best_weights(folder: Path) -> Path:
    """The file of a checkpoint that is for use: the average of weights, if one was made."""
    average = folder / "average.safetensors"
    return average if average.exists() else folder / "model.safetensors"


def verify_checkpoint(folder: Path) -> None:
    """Compare a checkpoint with its manifest, which must list all that is read of it. Raises ModelError."""
    verify_folder(folder, [*CHECKPOINT_FILES, best_weights(folder).name])


def save_checkpoint(
    run_dir: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    keep: int,
    every: int,
    average: dict[str, Tensor],
) -> None:
    """Write `checkpoints/step-NNNNNNNN`, then the index; prune all but the best, the newest `keep`, and the
    newest `keep` at multiples of `every` steps, which interruptions thus never push out.

    `average` are the weights for use, empty where those are the model's own. Raises StorageError, which says
    how much room is needed and free; the checkpoints that there were are still there then.
    """
    device = next(model.parameters()).device
    generators = {"cpu": torch.get_rng_state()}  # those that training draws from
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    state.rng = {name: values.numpy().tobytes().hex() for name, values in generators.items()}
    moments = {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()  # frozen ones have none
    }

    def fill(folder: Path) -> None:
        save_file(model.state_dict(), folder / "model.safetensors")
        save_file(moments, folder / "optimizer.safetensors")
        if average:
            save_file(average, folder / "average.safetensors")
        write_text(folder / "state.json", json.dumps(asdict(state), indent=1, sort_keys=True) + "\n")

    folder = run_dir / "checkpoints" / f"step-{state.step:08d}"
    try:
        write_folder(folder, fill)
    except StorageError as error:
        tensors = [*model.state_dict().values(), *moments.values(), *average.values()]
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
        free = shutil.disk_usage(run_dir).free / 2**20
        raise StorageError(f"{error}; {needed:,.0f} MiB are needed, {free:,.0f} MiB are free") from error
    best = None if state.best_step is None else f"step-{state.best_step:08d}"
    write_atomically(folder.parent / "index.json", json.dumps({"best": best, "last": folder.name}) + "\n")
    newest = [*checkpoint_folders(run_dir)[-keep:], *checkpoint_folders(run_dir, every)[-keep:]]
    spared = {best, *(path.name for path in newest)}
    for old in checkpoint_folders(run_dir):
        if old.name not in spared:
            with suppress(OSError):  # renamed first, so that no half of one is ever taken for a checkpoint
                shutil.rmtree(old.rename(old.with_name(f".{old.name}.tmp")))


class Checkpoint(NamedTuple):
    """A verified checkpoint."""

    folder: Path
    state: TrainState


def open_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint and read its state. Raises ModelError if it is damaged."""
    verify_checkpoint(folder)
    file = folder / "state.json"
    try:
        values = read_json(file)
        values.setdefault("batch_order", 0)  # checkpoints of earlier versions lack it
        if differing := {item.name for item in fields(TrainState)} ^ values.keys():
            names = ", ".join(sorted(differing))
            raise ModelError(
                f"{file}: missing or unknown: {names}; another version of mtrain may have written it"
            )
        if "cpu" not in values["rng"]:
            raise ModelError(f"{file}: the state of the random generator is missing")
        return Checkpoint(folder, TypeAdapter(TrainState).validate_python(values))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"{file}: not the state of a checkpoint: {error}") from None


def load_checkpoint(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore weights, optimizer and, as far as the device is of the same kind, generators, in place.

    Raises ModelError if anything is amiss.
    """
    load_weights(model, checkpoint.folder / "model.safetensors")
    file = checkpoint.folder / "optimizer.safetensors"
    tensors, device = load_tensors(file), next(model.parameters()).device
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # frozen, without a state
            continue
        shapes = {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        for key, shape in shapes.items():
            found = tensors.get(f"{key}.{name}")
            if found is None or found.shape != shape or not found.is_floating_point():
                raise ModelError(f"{file}: {key}.{name} is missing or does not fit the model")
            optimizer.state[parameter][key] = found.to(device)
    try:
        for kind, state in checkpoint.state.rng.items():
            generator = torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
            if kind == "cpu":
                torch.set_rng_state(generator)
            elif kind == device.type:
                torch.cuda.set_rng_state(generator, device)
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"{checkpoint.folder / 'state.json'}: not the state of a generator: {error}"
        ) from None


def set_newer_aside(checkpoint: Checkpoint) -> None:
    """Rename later checkpoints, damaged or no longer wanted, so that none is taken for the newest."""
    for folder in checkpoint_folders(checkpoint.folder.parent.parent):
        if folder.name > checkpoint.folder.name:
            names = (f"superseded-{folder.name}{end}" for end in chain([""], map("-{}".format, count(2))))
            aside = next(path for path in map(folder.with_name, names) if not path.exists())
            log.warning("%s: set aside as %s", folder, aside.name)
            folder.rename(aside)
