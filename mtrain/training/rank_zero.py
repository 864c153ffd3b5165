"""What rank 0 does for all: it alone writes files, and it validates with the help of the other ranks."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from mtrain.distributed.ranks import Json, Ranks
from mtrain.model.build import AnyModel
from mtrain.training.model_selection import ModelSelection
from mtrain.training.records.saver import Saver
from mtrain.training.step.average import WeightAverage


class Leader:
    """Lets rank 0 do some work while the other ranks wait, and gives them the state that results."""

    def __init__(self, ranks: Ranks, average: WeightAverage, selection: ModelSelection, saver: Saver):
        self.ranks, self.average, self.selection, self.saver = ranks, average, selection, saver

    def lead(self, work: Callable[[], object], model: AnyModel | None = None) -> None:
        """Let rank 0 do `work`. The others do their share of the validation of `model`, if it is given."""
        state = self.saver.state

        def share(rank: int, size: int) -> Json:
            assert model is not None
            return self.selection.validator.share(model, rank, size)

        def adopt(reported: Json) -> None:
            self.saver.saved_step = reported["saved_step"]
            state.adopt(reported["state"])

        def report() -> Json:
            return {"state": asdict(state), "saved_step": self.saver.saved_step}

        self.ranks.lead(work, share, report, adopt)

    def save(self, last: bool) -> None:
        """Save a checkpoint; see `Saver.save`."""
        self.saver.complete_state(self.ranks)
        self.ranks.barrier()  # all have read the checkpoints that they average, and rank 0 may now remove one
        self.lead(lambda: self.saver.save(last))

    def validate(self, last: bool = False) -> None:
        """Validate and publish the weights; see `ModelSelection.validate`."""
        saved = self.saver.is_saved
        self.lead_validation(lambda model: self.selection.validate(model, saved, last), last)

    def lead_validation(self, work: Callable[[AnyModel], object], last: bool) -> None:
        """Let rank 0 do `work` with the weights to validate. Running out of memory for these weights counts
        as a failed validation; the `last` one is then repeated. The caller discards the average."""
        while not self._try_to_validate(work) and last:
            pass

    def _try_to_validate(self, work: Callable[[AnyModel], object]) -> bool:
        """Whether memory sufficed for the weights."""
        with ExitStack() as stack:
            try:
                model = stack.enter_context(self.average.applied(self.ranks))
            except MemoryError as error:  # on all ranks
                self.lead(partial(self.selection.count_failure, error))
                return False
            self.lead(lambda: work(model), model)
            return True
