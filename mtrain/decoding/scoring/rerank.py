"""Noisy-channel reranking: choose among the translations of each line with a model of the opposite direction.

Yee et al., "Simple and Effective Noisy Channel Modeling for Neural Machine Translation", EMNLP 2019,
section 3, without a language model.
"""

from collections.abc import Iterable, Iterator
from itertools import tee
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, StringConstraints, ValidationError

from mtrain.config.sections.corpora import TextCorpus
from mtrain.data.reading.blocks import read_corpus
from mtrain.data.reading.lines import raise_errors
from mtrain.decoding.scoring.score import Scored, score_pairs
from mtrain.decoding.translate import Translator
from mtrain.errors import DataError
from mtrain.tokenizer.tokenizer import SPACES


class RankedText(BaseModel):
    """One of the translations of a line, and its score."""

    text: Annotated[str, StringConstraints(pattern=r"\A[^\x00\n\r]*\z")]
    score: FiniteFloat


class NBest(BaseModel):
    """The part of a line of `mtrain translate --json --n-best N` that reranking needs."""

    n_best: Annotated[list[RankedText], Field(min_length=1)]


def read_n_best(sources: Path, n_best: Path) -> Iterator[tuple[str, list[RankedText]]]:
    """Yield each line of `sources` with its translations, best first.

    Raises DataError if a file cannot be read, their line counts differ, or a line of `n_best` is malformed.
    """
    pairs = raise_errors(read_corpus(TextCorpus(source=str(sources), target=str(n_best))))
    for number, (source, line) in enumerate(pairs, start=1):
        try:
            candidates = NBest.model_validate_json(line, strict=True).n_best
        except ValidationError:
            wanted = "the output of `mtrain translate --json --n-best N`, N at least 2"
            raise DataError(f"{n_best}:{number}: malformed; expected {wanted}") from None
        yield source, candidates


def rerank(
    reverse: Translator, lines: Iterable[tuple[str, list[RankedText]]], weight: float
) -> Iterator[str]:
    """Yield the best translation of each line, in bounded memory.

    The value of a translation is its score plus `weight` times the mean log-probability (nats per token, EOS
    included) of the source given the translation, according to `reverse`. Translations that `reverse` cannot
    score because one side is too long are chosen, by their score, only if there are no others.
    """
    ours, theirs = tee(lines)
    pairs = ((candidate.text, source) for source, candidates in theirs for candidate in candidates)
    scored = score_pairs(reverse, pairs)
    for _, candidates in ours:
        values = [_value(candidate.score, next(scored), weight) for candidate in candidates]
        yield candidates[values.index(max(values))].text.translate(SPACES)
    next(scored, None)  # raises the error of `lines`, if any, which `ours` does not repeat


def _value(score: float, channel: Scored, weight: float) -> tuple[bool, float]:
    if not channel.tokens:
        return False, score
    return True, score + weight * channel.log_prob / len(channel.tokens)
