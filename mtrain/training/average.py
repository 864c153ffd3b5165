"""The weights that are validated and published, where they are an average of those that training makes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mtrain.checkpoint.checkpoint import checkpoint_folders, load_tensors, verify_checkpoint
from mtrain.config.schema import TrainingConfig
from mtrain.errors import ModelError

log = logging.getLogger(__name__)


class Average:
    """An exponential moving average over steps (`ema_decay`; Polyak and Juditsky 1992), or the mean of the
    newest checkpoints (`average_checkpoints`; Vaswani et al. 2017, section 6.1), or neither."""

    def __init__(self, model: nn.Module, recipe: TrainingConfig):
        self.model, self.decay, self.count = model, recipe.ema_decay, recipe.average_checkpoints
        self.every = recipe.checkpoint_every
        self.weights: dict[str, Tensor] = {}
        if self.decay is not None:
            self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, step: int) -> None:
        """Take in the weights after `step`. The decay rises to its value, so that the random start fades."""
        if self.decay is not None:
            decay = min(self.decay, (1 + step) / (10 + step))
            now = [p.detach() for p in self.model.parameters()]
            update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            update(list(self.weights.values()), now, None)
        else:
            self.weights = {}  # of an earlier step

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint, in place. Raises ModelError if what it holds does not fit."""
        if self.decay is not None:
            tensors = load_tensors(file := folder / "average.safetensors")
            if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in self.weights.items()}:
                raise ModelError(f"{file}: its tensors are not those of the model")
            for name, tensor in tensors.items():
                self.weights[name].copy_(tensor)

    @contextmanager
    def applied(self, run_dir: Path) -> Iterator[None]:
        """Lend the average to the model; what training goes on from is put back at the end."""
        if self.count > 1:
            self.weights = self._mean_of_checkpoints(run_dir)
        own = {name: p.data for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.data = self.weights.get(name, own[name])
        try:
            yield
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = own[name]

    def _mean_of_checkpoints(self, run_dir: Path) -> dict[str, Tensor]:
        """The mean of the present weights and the checkpoints before, as many as are wanted and there."""
        mean = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        earlier = checkpoint_folders(run_dir, self.every)[1 - self.count :]
        number = 1
        for folder in earlier:
            try:
                verify_checkpoint(folder)
                weights = load_tensors(folder / "model.safetensors")
            except ModelError as error:
                log.warning("%s; the average does without it", error)
                continue
            number += 1
            for name, tensor in weights.items():
                mean[name].lerp_(tensor.to(mean[name].device), 1 / number)  # what is frozen stays as it is
        return mean
