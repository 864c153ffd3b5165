"""Which session decodes a batch, and which ones are kept."""

import logging
import threading
from functools import cache
from weakref import WeakSet

import torch
from torch import Tensor

from mtrain.decoding.batches import position_limit
from mtrain.decoding.search.beam import Hypothesis
from mtrain.decoding.search.constraints import check_forbidden_ids
from mtrain.decoding.search.search import maximum_lengths
from mtrain.decoding.sessions.inputs import Batch, Shape
from mtrain.decoding.sessions.session import Session, bucket
from mtrain.device import release_cached_memory
from mtrain.errors import is_out_of_memory
from mtrain.graph_capture import GraphPool, capture_lock
from mtrain.model.incremental import Models

log = logging.getLogger(__name__)

_SMALLEST_SOURCE, _SMALLEST_TARGET = 16, 32  # tokens
# Settings that no graph depends on: the inputs of a batch contain their effect, or search does not use them.
_OF_BATCHES = {"seed", "max_length_ratio", "max_length_offset", "min_length_ratio", "min_length_offset"}
_OF_BATCHES |= {"mbr", "alignment_layer", "split", "batch_tokens", "precision", "workers"}


_all_sessions: "WeakSet[Sessions]" = WeakSet()
_registry_lock = threading.Lock()


class Sessions:
    """Sessions of one model or an ensemble, of which recently used ones are kept.

    The class is thread-safe: threads search one after the other on a device. The graphs share the memory of
    a pool and the workspaces of matrix products. Replays must therefore not overlap, so a search ends by
    waiting for the device.
    """

    def __init__(self, models: Models):
        self.models = models
        self.device = device = models[0].weight.device
        memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 2**32
        self.max_bytes = memory // 4  # of idle sessions
        self._pool = GraphPool(device)
        self._kept: dict[tuple[Shape, str], Session] = {}  # the one used last comes last
        with _registry_lock:
            _all_sessions.add(self)

    @torch.inference_mode()
    def search(self, batch: Batch) -> list[list[Hypothesis]] | None:
        """The best hypotheses of each sentence, as `search` returns them; None if sessions do not support the
        settings, or there is too little memory for one.

        Raises UsageError if a forbidden id is not in the vocabulary.
        """
        rows, config, prefixes = batch.rows, batch.config, batch.prefixes
        if config.no_repeat_ngram or config.coverage_penalty:
            return None
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.float64)
        limits = maximum_lengths(self.models, lengths, config, prefixes)
        check_forbidden_ids(config, self.models[0].config.target_vocab_size)
        source = bucket(int(lengths.max()), _SMALLEST_SOURCE)
        shape = Shape(
            sentences=bucket(len(rows)),
            beams=config.hypotheses,
            source=min(source, position_limit(self.models) or source),
            positions=bucket(int(limits.max()), _SMALLEST_TARGET),
            prefixed=prefixes is not None and any(prefixes),
            sampled=config.samples is not None,
        )
        key = shape, config.model_dump_json(exclude=_OF_BATCHES)
        with _lock_of_searches(self.device):
            try:
                return self._search(key, batch, limits)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            log.warning("too little memory for a session of %d sentences: searching without", len(rows))
            with _registry_lock:
                known = [*_all_sessions]
            for each in known:  # also those of other models of a server
                if each.device == self.device:
                    each._kept.clear()
                    each._pool = GraphPool(each.device)  # so that the memory of the old one is freed
            with capture_lock:
                release_cached_memory(self.device)
        return None

    def _search(self, key: tuple[Shape, str], batch: Batch, limits: Tensor) -> list[list[Hypothesis]]:
        session = self._kept.pop(key, None) or Session(self.models, batch.config, key[0], self._pool)
        found = session.search(batch, limits)
        self._kept[key] = session
        while len(self._kept) > 1 and sum(one.bytes for one in self._kept.values()) > self.max_bytes:
            del self._kept[next(iter(self._kept))]
        return found


@cache
def _lock_of_searches(device: torch.device) -> threading.Lock:
    return threading.Lock()
