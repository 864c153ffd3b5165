"""Training checkpoints: weights and optimizer in safetensors, the rest in JSON. Nothing is pickled."""

import json
import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mtrain.checkpoint.state import TrainState
from mtrain.checkpoint.tensors import load_tensors, load_weights
from mtrain.device import random_states, restore_random_states
from mtrain.distributed.shards import divided_like, whole
from mtrain.errors import ModelError, StorageError
from mtrain.storage.atomic import free_name, write_atomically, write_folder, write_text
from mtrain.storage.manifest import read_json, verify_folder

log = logging.getLogger(__name__)

WEIGHTS, MOMENTS, AVERAGE = "model.safetensors", "optimizer.safetensors", "average.safetensors"
CHECKPOINT_FILES = (WEIGHTS, MOMENTS, "state.json")
TensorFiles = dict[str, dict[str, Tensor]]  # by the names of files and of tensors
INDEX = "index.json"  # in checkpoints/: names the best and the last checkpoint


def checkpoint_folders(run_dir: Path, every: int = 1) -> list[Path]:
    """The checkpoints of a run at multiples of `every` steps, oldest first."""
    found = (run_dir / "checkpoints").glob("step-" + "[0-9]" * 8)
    return sorted(path for path in found if path.is_dir() and int(path.name[5:]) % every == 0)


def evaluation_weights(folder: Path) -> Path:
    """The file with the weights to evaluate and publish: the averaged weights, if a checkpoint has any."""
    average = folder / AVERAGE
    return average if average.exists() else folder / WEIGHTS


def verify_checkpoint(folder: Path) -> None:
    """Compare a checkpoint with its manifest. Raises ModelError if a file is missing or damaged."""
    verify_folder(folder, [*CHECKPOINT_FILES, evaluation_weights(folder).name])


def collect_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor], is_first: bool = True
) -> TensorFiles:
    """The tensors to save: the weights, the optimizer's moments, and the averaged weights, if there are any.
    Tensors that are sharded over ranks are gathered in host memory, on rank 0 only; the result on other ranks
    is incomplete. All ranks call this together."""
    moments = {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()  # frozen parameters have none
    }

    def gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            complete = whole(tensor)
            if complete is tensor:
                found[name] = tensor
            elif is_first:
                found[name] = complete.cpu()
        return found

    files = {WEIGHTS: model.state_dict(), MOMENTS: moments}
    if average:
        files[AVERAGE] = average
    return {file: gather(tensors) for file, tensors in files.items()}


def describe_random_states(device: torch.device) -> dict[str, str]:
    """`TrainState.rng`: the current states of the random generators of the CPU and of a device."""
    return {kind: values.numpy().tobytes().hex() for kind, values in random_states(device).items()}


def save_checkpoint(run_dir: Path, files: TensorFiles, state: TrainState, keep: int, every: int) -> None:
    """Write `checkpoints/step-NNNNNNNN`, with the tensors of `collect_tensors`, and update the index, then
    prune older checkpoints.

    The best checkpoint, the newest `keep`, and the newest `keep` at multiples of `every` steps are kept, so
    that saves at frequent interruptions never replace the regular ones. Raises StorageError stating the
    required and the free space; the older checkpoints are then kept.
    """
    contents = state.to_json()

    def fill(folder: Path) -> None:
        for name, tensors in files.items():
            save_file(tensors, folder / name)
        write_text(folder / "state.json", json.dumps(contents, indent=1, sort_keys=True) + "\n")

    folder = run_dir / "checkpoints" / str(_name(state.step))
    try:
        write_folder(folder, fill)
    except StorageError as error:
        needed = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
        message = f"{error}; {needed / 2**20:,.0f} MiB needed"
        with suppress(OSError):  # of a file system that is not available
            message += f", {shutil.disk_usage(run_dir).free / 2**20:,.0f} MiB free"
        raise StorageError(message) from error
    _write_index(run_dir, state)
    _prune(run_dir, state, keep, every)


def _name(step: int | None) -> str | None:
    return None if step is None else f"step-{step:08d}"


def _write_index(run_dir: Path, state: TrainState, **more: Any) -> None:
    """Write the index: the best checkpoint, and the checkpoint of `state` as the last one."""
    index = {"best": _name(state.best_step), "last": _name(state.step), **more}
    write_atomically(run_dir / "checkpoints" / INDEX, json.dumps(index) + "\n")


def _prune(run_dir: Path, state: TrainState, keep: int, every: int) -> None:
    newest = [*checkpoint_folders(run_dir)[-keep:], *checkpoint_folders(run_dir, every)[-keep:]]
    kept = {_name(state.best_step), *(path.name for path in newest)}
    for old in checkpoint_folders(run_dir):
        if old.name not in kept:
            with suppress(OSError):  # renamed first, so that a partly deleted checkpoint is never used
                shutil.rmtree(old.rename(old.with_name(f".{old.name}.tmp")))


def record_validation(run_dir: Path, state: TrainState) -> None:
    """Record the outcome of a validation in the index: the checkpoint of the step was saved before it.

    Raises StorageError.
    """
    _write_index(run_dir, state, validated=state.outcome_of_validation())


def restore_validation(run_dir: Path, state: TrainState) -> TrainState:
    """The state after the validation that followed a checkpoint, if the index has its outcome."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        outcome = read_json(run_dir / "checkpoints" / INDEX)["validated"]
        if outcome["step"] == state.step:
            known = state.outcome_of_validation().keys() & outcome.keys()
            return TrainState.from_json({**state.to_json(), **{name: outcome[name] for name in known}})
    return state


class Checkpoint(NamedTuple):
    """A checkpoint whose files agree with its manifest."""

    folder: Path
    state: TrainState


def open_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint and read its state. Raises ModelError if it is damaged."""
    verify_checkpoint(folder)
    file = folder / "state.json"
    try:
        values = read_json(file)
        if unknown := values.keys() - TrainState().to_json().keys():
            problem = f"unknown: {', '.join(sorted(unknown))}"
            raise ModelError(f"{file}: {problem}; another version of mtrain may have written it")
        if "cpu" not in values.get("rng", ()):
            raise ModelError(f"{file}: the state of the random generator is missing")
        return Checkpoint(folder, TrainState.from_json(values))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"{file}: not a valid checkpoint state: {error}") from None


def load_checkpoint(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the weights, the optimizer and the random generators in place.

    The state of a GPU's generator is restored only if the model is on a GPU of the same kind. Raises
    ModelError if anything is missing or does not fit the model.
    """
    load_weights(model, checkpoint.folder / WEIGHTS)
    file = checkpoint.folder / MOMENTS
    tensors, device = load_tensors(file), next(model.parameters()).device
    groups = [group for group in optimizer.param_groups if group["uses_muon"]]
    orthogonal = {id(parameter) for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # frozen parameters have no moments
            continue
        shapes = {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        if id(parameter) in orthogonal:  # see `Muon`
            shapes = {"exp_avg": parameter.shape}
        for key, shape in shapes.items():
            found = tensors.get(f"{key}.{name}")
            if found is None or found.shape != shape or not found.is_floating_point():
                raise ModelError(f"{file}: {key}.{name} is missing or does not fit the model")
            optimizer.state[parameter][key] = divided_like(found, parameter) if shape else found.to(device)
    try:
        saved = {kind: bytearray.fromhex(state) for kind, state in checkpoint.state.rng.items()}
        states = {kind: torch.frombuffer(state, dtype=torch.uint8) for kind, state in saved.items()}
        restore_random_states(states, device)
    except (ValueError, RuntimeError) as error:
        file = checkpoint.folder / "state.json"
        raise ModelError(f"{file}: not a valid state of a random generator: {error}") from None


def rename_newer_checkpoints(folder: Path, state: TrainState) -> None:
    """Rename the checkpoints that are newer than the one in `folder`, from which training resumes with
    `state`, to superseded-*.

    Otherwise, the next resume would start from one of them.
    """
    run_dir = folder.parent.parent
    newer = [other for other in checkpoint_folders(run_dir) if other.name > folder.name]
    if newer:
        _write_index(run_dir, state)
    for other in newer:
        rename_superseded(other)


def rename_superseded(path: Path) -> None:
    """Rename a file or folder that training from an older checkpoint leaves behind to superseded-*."""
    free = free_name(path.with_name(f"superseded-{path.name}"))
    log.warning("%s: renamed to %s", path, free.name)
    path.rename(free)
