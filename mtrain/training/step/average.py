"""Averages of the weights, which are validated and published instead of the trained weights."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mtrain.checkpoint.checkpoint import AVERAGE, checkpoint_folders, verify_checkpoint
from mtrain.checkpoint.tensors import load_tensors, model_without_weights
from mtrain.config.sections.training import TrainingConfig
from mtrain.distributed.ranks import Ranks
from mtrain.distributed.shards import divided_like, has_shards, own_part, whole
from mtrain.errors import ModelError, is_out_of_memory
from mtrain.model.build import AnyModel

log = logging.getLogger(__name__)


class WeightAverage:
    """An exponential moving average over steps (`ema_decay`; Polyak and Juditsky 1992), the mean of the
    newest checkpoints (`average_checkpoints`; Vaswani et al. 2017, section 6.1), or neither.

    `weights` has the averaged weights by name. It is empty if there is no average at the current step.
    """

    def __init__(self, model: AnyModel, config: TrainingConfig):
        self.model = model
        self.decay, self.count = config.ema_decay, config.average_checkpoints
        self.checkpoint_every = config.checkpoint_every
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
            current = [own_part(p.detach()) for p in self.model.parameters()]
            update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            update([own_part(weight) for weight in self.weights.values()], current, None)

    def discard(self) -> None:
        """Free the mean of the newest checkpoints, which no later step needs."""
        if self.decay is None:
            self.weights = {}

    def load(self, folder: Path) -> None:
        """Restore the average from a checkpoint. Raises ModelError if its tensors do not fit the model."""
        file = folder / AVERAGE
        if self.decay is None and not (self.count > 1 and file.exists()):
            return
        tensors, parameters = load_tensors(file), dict(self.model.named_parameters())
        if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in parameters.items()}:
            raise ModelError(f"{file}: its tensors do not match the model")
        divided = {name: divided_like(tensors[name], p.detach()) for name, p in parameters.items()}
        self.weights = {name: tensor.clone() for name, tensor in divided.items()}

    @contextmanager
    def applied(self, ranks: Ranks) -> Iterator[AnyModel]:
        """A context manager that yields the model with the averaged weights, or unchanged if there is no
        average. All ranks enter it together.

        This is the trained model itself, whose own weights are restored at the exit. If the weights are
        divided among the ranks (FSDP), it is a copy with the gathered weights. Raises MemoryError on all
        ranks if the memory of one does not suffice for it.
        """
        if has_shards(next(self.model.parameters())):
            yield self._gathered_model(ranks)
            return
        trained = {name: p.data for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.data = self.weights.get(name, trained[name])
        try:
            yield self.model
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = trained[name]

    def _gathered_model(self, ranks: Ranks) -> AnyModel:
        weights, device = self.model.state_dict() | self.weights, ranks.device
        complete = self._allocate(weights, ranks)
        with ranks.watched():
            for name, tensor in weights.items():
                complete[name].copy_(whole(tensor.detach()))
        model = model_without_weights(self.model.config)
        model.load_state_dict(complete, assign=True)
        model.embed.make_positions()
        return model.to(device)

    def _allocate(self, weights: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
        """Memory for complete weights on this rank. The ranks agree on whether it suffices before they gather
        the weights: a rank that fails later leaves the others waiting."""
        allocated = {}
        with ranks.agreed():
            try:
                for name, tensor in weights.items():
                    allocated[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device)
                # Gathering a tensor needs a buffer of its size, which PyTorch then keeps.
                torch.empty_like(max(allocated.values(), key=Tensor.numel))
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    raise MemoryError("out of memory for a complete copy of the weights") from None
                raise
        return allocated

    def average_checkpoints(self, run_dir: Path, step: int, ranks: Ranks) -> None:
        """Average the current weights, those of `step`, with the weights of the newest `count` - 1 earlier
        checkpoints. Rank 0 chooses the checkpoints, because the file system may not show the same folders to
        all ranks at once."""
        if self.count == 1:
            return
        chosen = ranks.broadcast(self._valid_checkpoints(run_dir, step) if ranks.is_first else None)
        mean = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for number, name in enumerate(chosen, start=2):
            for key, tensor in load_tensors(run_dir / "checkpoints" / name / "model.safetensors").items():
                # Unlike a sum, lerp leaves equal (frozen) weights exactly as they are.
                own_part(mean[key]).lerp_(own_part(divided_like(tensor, mean[key])), 1 / number)
        self.weights = mean

    def _valid_checkpoints(self, run_dir: Path, step: int) -> list[str]:
        """The names of the newest `count` - 1 checkpoints before `step`, without damaged ones. If saving
        is repeated, there may be one of `step`."""
        folders, valid = checkpoint_folders(run_dir, self.checkpoint_every), []
        for folder in [each for each in folders if each.name < f"step-{step:08d}"][1 - self.count :]:
            try:
                if folder not in self._verified:
                    verify_checkpoint(folder)
                    self._verified.add(folder)
                valid.append(folder.name)
            except ModelError as error:
                log.warning("%s; left out of the average", error)
        return valid
