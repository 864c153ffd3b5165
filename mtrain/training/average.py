"""Averages of the weights, which are validated and published instead of the trained weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mtrain.checkpoint.checkpoint import checkpoint_folders, verify_checkpoint
from mtrain.checkpoint.tensors import load_tensors
from mtrain.config.training import TrainingConfig
from mtrain.errors import ModelError

log = logging.getLogger(__name__)


class WeightAverage:
    """An exponential moving average over steps (`ema_decay`; Polyak and Juditsky 1992), the mean of the
    newest checkpoints (`average_checkpoints`; Vaswani et al. 2017, section 6.1), or neither.

    `weights` has the averaged weights by name. It is empty if there is no average at the current step.
    """

    def __init__(self, model: nn.Module, recipe: TrainingConfig):
        self.model, self.decay, self.count = model, recipe.ema_decay, recipe.average_checkpoints
        self.checkpoint_every = recipe.checkpoint_every
        self.weights: dict[str, Tensor] = {}
        self._verified: set[Path] = set()  # checkpoints, so that each is hashed only once
        if self.decay is not None:
            self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, step: int) -> None:
        """Update the moving average after `step`.

        The decay increases to the configured value, so that the initial weights do not dominate at first.
        """
        if self.decay is not None:
            decay = min(self.decay, (1 + step) / (10 + step))
            current = [p.detach() for p in self.model.parameters()]
            update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            update(list(self.weights.values()), current, None)
        else:
            self.weights = {}  # the mean was that of an earlier step

    def load(self, folder: Path) -> None:
        """Restore the average from a checkpoint. Raises ModelError if its tensors do not fit the model."""
        file = folder / "average.safetensors"
        if self.decay is None and not (self.count > 1 and file.exists()):
            return
        tensors, parameters = load_tensors(file), dict(self.model.named_parameters())
        if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in parameters.items()}:
            raise ModelError(f"{file}: its tensors differ from those of the model")
        self.weights = {name: tensors[name].to(p.device, copy=True) for name, p in parameters.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context manager that gives the model the averaged weights, and restores its own on exit."""
        trained = {name: p.data for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.data = self.weights.get(name, trained[name])
        try:
            yield
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = trained[name]

    def average_checkpoints(self, run_dir: Path) -> None:
        """Average the current weights with those of the newest `count` - 1 checkpoints."""
        if self.count == 1:
            return
        mean = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        number = 1
        for folder in checkpoint_folders(run_dir, self.checkpoint_every)[1 - self.count :]:
            try:
                if folder not in self._verified:
                    verify_checkpoint(folder)
                    self._verified.add(folder)
                weights = load_tensors(folder / "model.safetensors")
            except ModelError as error:
                log.warning("%s; left out of the average", error)
                continue
            number += 1
            for name, tensor in weights.items():
                # Unlike a sum, lerp leaves equal (frozen) weights exactly as they are.
                mean[name].lerp_(tensor.to(mean[name].device), 1 / number)
        self.weights = mean
