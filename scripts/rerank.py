"""Noisy-channel reranking: of several translations of each line, print the one that a model of the opposite
direction agrees with most (Yee et al., "Simple and Effective Noisy Channel Modeling for Neural Machine
Translation", EMNLP 2019, section 3, without a language model).

    mtrain translate MODEL -i in.en -o in.jsonl --beam-size 6 --n-best 6 --json
    python scripts/rerank.py REVERSE in.jsonl -i in.en > out.de

A translation is worth its score, as MODEL's search gave it, and WEIGHT times the mean log-probability (nats)
of a token of the source, EOS included, when REVERSE translates it back. The best WEIGHT depends on MODEL's
length penalty, by which its score is normalised: choose it on a validation set. 0.07 was the best of nine on
that of Multi30k, German with a penalty of 1.4. That in.jsonl is of in.en, and REVERSE of the opposite
direction, cannot be checked.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from itertools import tee
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, StringConstraints, ValidationError

from mtrain import Translator
from mtrain.cli import failures_as_exits
from mtrain.cli.terminal import output, require_file
from mtrain.config.corpora import TextCorpus
from mtrain.data.corpus import clean, read_corpus
from mtrain.decoding.score import Scored, score_pairs
from mtrain.errors import DataError


class Hypothesis(BaseModel):
    text: Annotated[str, StringConstraints(pattern=r"\A[^\x00\n\r]*\z")]
    score: FiniteFloat


class NBest(BaseModel):
    """What `mtrain translate --json --n-best N` says of a line."""

    n_best: Annotated[list[Hypothesis], Field(min_length=1)]


def read_n_best(sources: Path, answers: Path) -> Iterator[tuple[str, list[Hypothesis]]]:
    """Each line of `sources` and its translations, best first.

    Raises DataError if a file cannot be read, they differ in length, or a line of `answers` is not as
    `translate` writes it.
    """
    pairs = clean(read_corpus(TextCorpus(source=str(sources), target=str(answers))))
    for number, (source, answer) in enumerate(pairs, start=1):
        try:
            hypotheses = NBest.model_validate_json(answer, strict=True).n_best
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise DataError(
                f"{answers}:{number}: not as `translate --json --n-best 2` writes it: {reason}"
            ) from None
        yield source, hypotheses


def rerank(
    reverse: Translator, lines: Iterable[tuple[str, list[Hypothesis]]], weight: float
) -> Iterator[str]:
    """The best hypothesis of each line, in order, in bounded memory. One that is too long for `reverse`, or
    whose source is, is chosen only if all are, then by its score."""
    ours, theirs = tee(lines)
    pairs = ((hypothesis.text, source) for source, hypotheses in theirs for hypothesis in hypotheses)
    scored = score_pairs(reverse, pairs)
    for _, hypotheses in ours:
        values = [_value(hypothesis.score, next(scored), weight) for hypothesis in hypotheses]
        yield hypotheses[values.index(max(values))].text


def _value(score: float, channel: Scored, weight: float) -> tuple[bool, float]:
    if not channel.tokens:
        return False, score
    return True, score + weight * channel.log_prob / len(channel.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reverse", metavar="REVERSE", help="run or model folder, of the opposite direction")
    parser.add_argument("n_best", type=Path, metavar="N_BEST", help="of `mtrain translate --json --n-best N`")
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help="what was translated")
    parser.add_argument("--weight", type=float, default=0.07, help="of REVERSE [default: 0.07]")
    parser.add_argument("--batch-tokens", type=int, help="padded source tokens of a batch")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [default: auto]")
    given = parser.parse_args()
    if not 0 <= given.weight < math.inf:
        parser.error(f"--weight {given.weight}: give a number from 0 on")
    size = [] if given.batch_tokens is None else [f"decoding.batch_tokens={given.batch_tokens}"]
    with failures_as_exits():
        for file in (given.input, given.n_best):
            require_file(file)
        reverse = Translator.load(given.reverse, given.device, size)
        with output() as out:
            for text in rerank(reverse, read_n_best(given.input, given.n_best), given.weight):
                out.write(f"{text}\n")


if __name__ == "__main__":
    main()
