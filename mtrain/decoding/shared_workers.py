"""Decoding that several ranks share."""

from collections.abc import Callable

from pydantic import TypeAdapter

from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.translation import Translation
from mtrain.decoding.workers import Decoded, Workers
from mtrain.distributed.ranks import JsonValue, Ranks

_TASK = TypeAdapter(DecodingTask)
_SHARE = TypeAdapter(list[list[Translation]])  # the translations of some parts


class SharedWorkers:
    """The workers of all ranks. Only rank 0 knows what to decode; it sends the parts to the others, and
    receives their translations."""

    def __init__(self, workers: Workers, ranks: Ranks):
        """`workers` are the workers of this rank."""
        self.own, self.ranks = workers, ranks
        self.count = workers.count * ranks.size

    def lead(self, work: Callable[[], object]) -> None:
        """Let rank 0 do `work`, which calls `decode`; the others decode their shares until it is done."""
        if self.ranks.is_first:
            work()
            self.ranks.broadcast(None, preparing=True)
            return
        while (task := self.ranks.broadcast(None, preparing=True)) is not None:
            try:
                self._decode(_TASK.validate_python(task))
            except Exception as error:
                if not self.ranks.is_agreed(error):  # otherwise, rank 0 handles it
                    raise

    def decode(self, task: DecodingTask, decoded: Decoded = lambda _, found: None) -> list[list[Translation]]:
        """Like `Workers.decode`, on rank 0. `decoded` is called with the parts of the other ranks last."""
        parts = task.parts
        # Neighbors in the order of length go to different ranks, which thus have equal amounts of work.
        order = sorted(range(len(parts)), key=lambda row: len(parts[row].source))
        shared_task = task._replace(parts=[parts[row] for row in order])
        self.ranks.broadcast(_TASK.dump_python(shared_task, mode="json"), preparing=True)
        shares = self._decode(shared_task, decoded)
        results: list[list[Translation]] = [[]] * len(parts)
        for rank, share in enumerate(shares):
            for row, found in zip(order[rank :: len(shares)], _SHARE.validate_python(share), strict=True):
                results[row] = found
                if rank > 0:
                    decoded(parts[row], found)
        return results

    def _decode(self, task: DecodingTask, decoded: Decoded = lambda _, found: None) -> list[JsonValue]:
        """Decode the share of this rank. Returns the results of all ranks."""
        parts = task.parts[self.ranks.rank :: self.ranks.size]
        with self.ranks.agreed():
            found = self.own.decode(task._replace(parts=parts), decoded)
        return self.ranks.gather(_SHARE.dump_python(found, mode="json"))
