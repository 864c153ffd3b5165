"""What a search finds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hypothesis:
    """One translation as target ids, without BOS and EOS."""

    ids: list[int]
    log_prob: float  # of all its tokens, EOS included, nats
    score: float  # log_prob / length ** length_penalty, the length counting EOS, and the coverage penalty
    finished: bool  # ended by EOS, not cut at the maximum length
