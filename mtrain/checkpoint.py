"""Checkpoints, from which training goes on, and model folders, from which one translates.

Tensors are safetensors and the rest is JSON or YAML; nothing is ever pickled.
"""

import json
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mtrain.config import SectionT, override, read_yaml_file, to_yaml, validate
from mtrain.errors import ModelError, UsageError
from mtrain.model.transformer import Transformer
from mtrain.schema import Config, ModelFolderConfig
from mtrain.storage import MANIFEST, verify_folder, write_atomically, write_folder
from mtrain.tokenizer import Tokenizer, model_config

log = logging.getLogger(__name__)

_CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@dataclass
class TrainState:
    """Where training stands; with weights and optimizer, all that a continued run needs."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    next_batch: int = 0  # steps of this epoch done
    target_tokens_seen: int = 0
    seconds: float = 0.0  # of training and validation
    best_step: int | None = None
    best_score: float | None = None
    validations_without_improvement: int = 0
    skipped_steps: int = 0  # for NaN or infinity
    skipped_in_a_row: int = 0
    window: dict[str, float] = field(default_factory=dict)  # sums since the last line of metrics.jsonl
    data_fingerprint: str = ""
    rng: dict[str, str] = field(default_factory=dict)


def rng_state(device: torch.device) -> dict[str, str]:
    """The state of the generators that training draws from: PyTorch's, of the CPU and of the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: state.numpy().tobytes().hex() for name, state in states.items()}


def restore_rng(states: dict[str, str], device: torch.device) -> None:
    """Undo `rng_state`, as far as the run is on a device of the same kind."""
    for name, state in states.items():
        tensor = torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(tensor)
        elif device.type == name:
            torch.cuda.set_rng_state(tensor, device)


def _load_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{file}: cannot read: {error}") from None


def load_weights(model: nn.Module, file: Path) -> None:
    """Copy the tensors of a safetensors file into a model. Raises ModelError naming what does not fit."""
    tensors, own = _load_tensors(file), model.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        raise ModelError(f"{file}: tensors missing: {missing or 'none'}; not expected: {extra or 'none'}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ModelError(f"{file}: {name} is {list(tensor.shape)}; the model has {list(own[name].shape)}")
        if not tensor.isfinite().all():
            raise ModelError(f"{file}: {name} holds NaN or infinity")
    model.load_state_dict(tensors)


# -------------------------------------------------------------------------------------------- checkpoints


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    found = (run_dir / "checkpoints").glob("step-" + "[0-9]" * 8)
    return sorted(folder for folder in found if folder.is_dir())


def save_checkpoint(
    run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, keep: int
) -> Path:
    """Write `checkpoints/step-NNNNNNNN`, then the index; prune all but the newest `keep` and the best."""
    state.rng = rng_state(next(model.parameters()).device)

    def fill(folder: Path) -> None:
        save_file(model.state_dict(), folder / "model.safetensors")
        save_file(_optimizer_tensors(model, optimizer), folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps(asdict(state), indent=1, sort_keys=True) + "\n")

    checkpoints = run_dir / "checkpoints"
    folder = checkpoints / f"step-{state.step:08d}"
    write_folder(folder, fill)
    best = None if state.best_step is None else f"step-{state.best_step:08d}"
    write_atomically(checkpoints / "index.json", json.dumps({"best": best, "last": folder.name}) + "\n")
    for old in checkpoint_folders(run_dir)[:-keep]:
        if old.name != best:
            shutil.rmtree(old, ignore_errors=True)
    return folder


class Checkpoint(NamedTuple):
    """A verified checkpoint."""

    folder: Path
    state: TrainState


def load_checkpoint(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore weights, optimizer and generators in place. Raises ModelError if anything is amiss."""
    folder = checkpoint.folder
    load_weights(model, folder / "model.safetensors")
    tensors = _load_tensors(folder / "optimizer.safetensors")
    for name, parameter in model.named_parameters():
        keys = {key: f"{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq")}
        if absent := [key for key in keys.values() if key not in tensors]:
            raise ModelError(f"{folder / 'optimizer.safetensors'}: tensors missing: {absent}")
        optimizer.state[parameter] = {key: tensors[full].to(parameter.device) for key, full in keys.items()}
    restore_rng(checkpoint.state.rng, next(model.parameters()).device)


def set_newer_aside(checkpoint: Checkpoint) -> None:
    """Rename later checkpoints, damaged or no longer wanted, so that none is taken for the newest."""
    for folder in checkpoint_folders(checkpoint.folder.parent.parent):
        if folder.name > checkpoint.folder.name:
            log.warning("%s: set aside as superseded-%s", folder, folder.name)
            aside = folder.with_name(f"superseded-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint and read its state. Raises ModelError if it is damaged."""
    verify_folder(folder, _CHECKPOINT_FILES)
    file = folder / "state.json"
    try:
        values = json.loads(file.read_bytes())
        if differing := {item.name for item in fields(TrainState)} ^ values.keys():
            raise ModelError(f"{file}: missing or unknown: {', '.join(sorted(differing))}")
        return Checkpoint(folder, TrainState(**values))
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file}: not the state of a checkpoint: {error}") from None


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


# ------------------------------------------------------------------------------------------ model folders


def publish_best(run_dir: Path, state: TrainState, config: Config, tokenizer: Tokenizer) -> None:
    """Make `RUN/model` the best checkpoint's weights with all that a translator needs, if it is not so."""
    if state.best_step is None:
        return
    weights = run_dir / "checkpoints" / f"step-{state.best_step:08d}" / "model.safetensors"
    if weights.exists():
        contents = to_yaml(_folder_config(config, tokenizer))
        if not _is_published(run_dir / "model", weights, contents):
            try:
                verify_folder(weights.parent, _CHECKPOINT_FILES)
            except ModelError as error:
                log.warning("%s; model/ stays as it is", error)
                return
            save_model_folder(run_dir / "model", weights, contents, tokenizer)


def _is_published(folder: Path, weights: Path, contents: str) -> bool:
    try:
        entries = [json.loads((place / MANIFEST).read_bytes()) for place in (folder, weights.parent)]
        same = entries[0]["model.safetensors"] == entries[1]["model.safetensors"]
        return same and (folder / "config.yaml").read_text(encoding="utf-8") == contents
    except (OSError, ValueError, LookupError, TypeError):
        return False


def save_model_folder(folder: Path, weights: Path, contents: str, tokenizer: Tokenizer) -> None:
    """Write config.yaml with `contents`, a copy of `weights`, and tokenizer/."""

    def fill(temporary: Path) -> None:
        (temporary / "config.yaml").write_text(contents, encoding="utf-8", newline="\n")
        shutil.copyfile(weights, temporary / "model.safetensors")
        (temporary / "tokenizer").mkdir()
        for file in tokenizer.files:
            for part in (file, file.with_suffix(".vocab")):
                if part.exists():  # the listing is for readers; a model can do without
                    shutil.copyfile(part, temporary / "tokenizer" / part.name)

    write_folder(folder, fill)


class LoadedModel(NamedTuple):
    """A model in eval mode with its tokenizer and settings."""

    model: Transformer
    tokenizer: Tokenizer
    config: ModelFolderConfig


def load_model(path: Path, overrides: Sequence[str] = ()) -> LoadedModel:
    """Load a model folder, or the best model of a run folder, onto the CPU, every file verified.

    Raises ModelError if it is missing, damaged, or its parts disagree.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: {'not a folder' if path.exists() else 'no such model or run folder'}")
    if not (path / "checkpoints").is_dir():
        return _load_folder(path, overrides)
    folder = path / "model"
    for _ in range(2):  # a run that goes on may put a new model in the place of the one that is being read
        with suppress(ModelError):
            return _load_folder(folder, overrides)
        time.sleep(0.2)
    return _load_folder(folder, overrides) if folder.is_dir() else _load_best(path, overrides)


def _load_folder(folder: Path, overrides: Sequence[str]) -> LoadedModel:
    verify_folder(folder, ("config.yaml", "model.safetensors"))
    config = _read_config(folder / "config.yaml", ModelFolderConfig)
    return _build(config, Tokenizer(folder / "tokenizer"), folder / "model.safetensors", overrides)


def _load_best(run_dir: Path, overrides: Sequence[str]) -> LoadedModel:
    """The best checkpoint of a run that has no `model/`, or its newest if the best is not known."""
    folders = checkpoint_folders(run_dir)
    if not folders:
        raise ModelError(f"{run_dir}: this run has no checkpoint yet")
    try:
        best = json.loads((run_dir / "checkpoints" / "index.json").read_bytes())["best"]
    except (OSError, ValueError, LookupError, TypeError):
        best = None
    folder = next((folder for folder in folders if folder.name == best), folders[-1])
    verify_folder(folder, _CHECKPOINT_FILES)
    config, tokenizer = _read_config(run_dir / "config.yaml", Config), Tokenizer(run_dir / "tokenizer")
    return _build(_folder_config(config, tokenizer), tokenizer, folder / "model.safetensors", overrides)


def _read_config(file: Path, section: type[SectionT]) -> SectionT:
    try:
        return validate(section, read_yaml_file(file), str(file))
    except UsageError as error:  # of the folder, not of the user
        raise ModelError(str(error)) from None


def _build(
    config: ModelFolderConfig, tokenizer: Tokenizer, weights: Path, overrides: Sequence[str]
) -> LoadedModel:
    raw = config.model_dump(mode="json")
    for assignment in overrides:
        if not assignment.startswith("decoding."):
            raise UsageError(f"--set {assignment}: of a trained model only decoding.* can be set")
        override(raw, assignment)
    config = validate(ModelFolderConfig, raw, "--set")
    sizes = (tokenizer.source_vocab_size, tokenizer.target_vocab_size)
    if sizes != (config.model.source_vocab_size, config.model.target_vocab_size):
        raise ModelError(f"{weights.parent}: the tokenizer has {sizes} pieces; the model expects others")
    network = config.model
    if (network.pad_id, network.unk_id, network.bos_id, network.eos_id) != tokenizer.special:
        raise ModelError(f"{weights.parent}: the tokenizer's special ids are not those of the model")
    model = Transformer(network)
    load_weights(model, weights)
    return LoadedModel(model.eval(), tokenizer, config)


def _folder_config(config: Config, tokenizer: Tokenizer) -> ModelFolderConfig:
    return ModelFolderConfig(
        source_lang=config.data.source_lang,
        target_lang=config.data.target_lang,
        max_length=config.data.max_length,
        tokenizer=config.tokenizer,
        model=model_config(config.model, tokenizer, config.data.max_length),
        decoding=config.decoding,
    )
