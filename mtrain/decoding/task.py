"""`DecodingTask`: what to decode, and what to return."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.split import Part


class DecodingTask(NamedTuple):
    """Parts to decode, and what is wanted of each."""

    config: DecodingConfig
    parts: Sequence[Part]
    target_lang: str  # in which `decoding.mbr` compares hypotheses
    n_best: int = 1  # translations of each part
    alignments: bool = False
    scored: bool = True  # if False, scores and log-probabilities are NaN, and greedy search is faster

    def to_fields(self) -> dict[str, Any]:
        """The task in a form that JSON can express."""
        return {**self._asdict(), "config": self.config.model_dump(mode="json")}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "DecodingTask":
        """The task whose `to_fields` were decoded from JSON."""
        parts = [
            Part(line, source, prefix, tuple(key), tuple(words))
            for line, source, prefix, key, words in fields["parts"]
        ]
        return cls(**{**fields, "config": DecodingConfig(**fields["config"]), "parts": parts})
