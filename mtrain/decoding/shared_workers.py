"""Decoding that several ranks share."""

from collections.abc import Callable
from typing import Any

from mtrain.decoding.split import Part
from mtrain.decoding.task import DecodingTask
from mtrain.decoding.translation import Translation, from_fields, to_fields
from mtrain.decoding.workers import Workers
from mtrain.distributed.ranks import Json, Ranks


class SharedWorkers:
    """The workers of all ranks. Only rank 0 knows what to decode; it sends the parts to the others, and
    receives their translations."""

    def __init__(self, workers: Workers, ranks: Ranks):
        """`workers` are those of this rank."""
        self.own, self.ranks = workers, ranks
        self.count = workers.count * ranks.size

    def lead(self, work: Callable[[], object]) -> None:
        """Let rank 0 do `work`, which calls `decode`; the others decode their shares until it is done."""
        self.ranks.lead(work, self._decode_share, lambda: None, lambda _: None)

    def decode(
        self, task: DecodingTask, decoded: Callable[[Part, list[Translation]], object] = lambda _, found: None
    ) -> list[list[Translation]]:
        """Like `Workers.decode`, on rank 0. `decoded` is called with the parts of the other ranks last."""
        parts = task.parts
        # Neighbors in the order of length go to different ranks, which thus have equal amounts of work.
        order = sorted(range(len(parts)), key=lambda row: len(parts[row].source))
        sorted_task = task._replace(parts=[parts[row] for row in order]).to_fields()
        shares = self.ranks.divide(lambda rank, size: self._decode_share(rank, size, sorted_task, decoded))
        results: list[list[Translation]] = [[]] * len(parts)
        for rank, share in enumerate(shares):
            for row, found in zip(order[rank :: len(shares)], from_fields(share), strict=True):
                results[row] = found
                if rank > 0:
                    decoded(parts[row], found)
        return results

    def _decode_share(
        self,
        rank: int,
        size: int,
        task: Json = None,
        decoded: Callable[[Part, list[Translation]], object] = lambda _, found: None,
    ) -> list[list[dict[str, Any]]]:
        """Decode the share of this rank of what rank 0 gives as `task`."""
        whole = DecodingTask.from_fields(self.ranks.broadcast(task))
        return to_fields(self.own.decode(whole._replace(parts=whole.parts[rank::size]), decoded))
