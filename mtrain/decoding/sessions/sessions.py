"""Which session decodes a batch, and which ones are kept."""

import logging
import threading
from collections.abc import Sequence

import torch

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.batches import position_limit
from mtrain.decoding.search.beam import Hypothesis
from mtrain.decoding.search.constraints import check_forbidden_ids
from mtrain.decoding.search.search import maximum_lengths
from mtrain.decoding.sessions.inputs import Batch, Keys, Rows, Shape
from mtrain.decoding.sessions.session import Session, bucket
from mtrain.device import release_cached_memory
from mtrain.errors import is_out_of_memory
from mtrain.model.incremental import DecodingTransformer

log = logging.getLogger(__name__)

_SMALLEST_SOURCE, _SMALLEST_TARGET = 16, 32  # tokens
SHRINK_FROM = 128  # rows; a step with fewer takes about as long as one with half of them
# Settings that no graph depends on: the inputs of a batch contain their effect, or search does not use them.
_OF_BATCHES = {"seed", "max_length_ratio", "max_length_offset", "min_length_ratio", "min_length_offset"}
_OF_BATCHES |= {"mbr", "alignment_layer", "split", "batch_tokens", "precision", "workers"}


class Sessions:
    """Sessions of one model or an ensemble, of which recently used ones are kept.

    It is thread-safe: a session is used by one thread at a time, and another thread makes one of its own.
    """

    def __init__(self, models: Sequence[DecodingTransformer], shrink_from: int = SHRINK_FROM):
        self.models, self.shrink_from = models, shrink_from
        self.device = device = models[0].weight.device
        memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 2**32
        self.max_bytes = memory // 4  # of idle sessions
        self._lock = threading.Lock()  # of the list
        self._idle: list[tuple[tuple[Shape, str], Session]] = []  # the one used last comes last

    @torch.inference_mode()
    def search(
        self, rows: Rows, config: DecodingConfig, prefixes: Rows | None = None, keys: Keys = ()
    ) -> list[list[Hypothesis]] | None:
        """The best hypotheses of each sentence, as `search` returns them; None if sessions do not support the
        settings, or there is too little memory for one. `rows` are source ids that end with EOS.

        Raises UsageError if a prefix is too long for the model, or a forbidden id is not in the vocabulary.
        """
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
        try:
            session = self._idle_session(key) or Session(self.models, config, shape, self.shrink_from)
            found = session.search(Batch(rows, config, prefixes, keys, limits))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("too little memory for a session of %d sentences: searching without", len(rows))
            session = None
        with self._lock:
            if session is not None:
                self._idle.append((key, session))
                while len(self._idle) > 1 and sum(one.bytes for _, one in self._idle) > self.max_bytes:
                    del self._idle[0]
                return found
            self._idle.clear()
        release_cached_memory(self.device)
        return None

    def _idle_session(self, key: tuple[Shape, str]) -> Session | None:
        """Take a session that no thread uses."""
        with self._lock:
            place = next((place for place, (other, _) in enumerate(self._idle) if other == key), None)
            return None if place is None else self._idle.pop(place)[1]
