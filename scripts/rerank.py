"""Choose among several translations of each line the one from which a model of the opposite direction best
tells the line: noisy-channel reranking (Yee et al., "Simple and Effective Noisy Channel Modeling for Neural
Machine Translation", EMNLP 2019, section 3, without a language model).

    mtrain translate MODEL -i in.en -o in.jsonl --beam-size 6 --n-best 6 --json
    python scripts/rerank.py REVERSE in.jsonl -i in.en -o out.de

The best has the highest sum of its score, as MODEL's search ranked it, and WEIGHT times the mean
log-probability (nats a token) of the line given it. Choose WEIGHT on a validation set.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from itertools import tee, zip_longest
from pathlib import Path
from typing import NamedTuple

from mtrain import Translator
from mtrain.cli import failures_as_exits
from mtrain.data.corpus import clean, read_lines
from mtrain.decoding.score import score_pairs
from mtrain.errors import DataError
from mtrain.storage import write_atomically
from mtrain.terminal import require_folder_of, require_other_file


class Choice(NamedTuple):
    """A line and its translations with their scores, best first."""

    source: str
    texts: list[str]
    scores: list[float]


def read_choices(sources: Path, n_best: Path) -> Iterator[Choice]:
    """What `mtrain translate --json --n-best N` wrote of each line of `sources`.

    Raises DataError if a file cannot be read, has fewer lines than the other or says something else.
    """
    lines, answers = clean(read_lines(sources)), clean(read_lines(n_best))
    for number, (line, answer) in enumerate(zip_longest(lines, answers), start=1):
        if line is None or answer is None:
            raise DataError(f"{sources if line is None else n_best}: ends before line {number} of the other")
        try:
            ways = json.loads(answer)["n_best"]
            yield Choice(line, [str(way["text"]) for way in ways], [float(way["score"]) for way in ways])
        except (ValueError, TypeError, LookupError):
            raise DataError(f"{n_best}:{number}: not of `mtrain translate --json --n-best N`") from None


def rerank(reverse: Translator, choices: Iterable[Choice], weight: float) -> Iterator[str]:
    """The translation of each line, in order, in bounded memory. One that is too long for `reverse` is
    chosen only if all are."""
    ours, theirs = tee(choices)
    scored = score_pairs(reverse, ((text, choice.source) for choice in theirs for text in choice.texts))
    for choice in ours:
        sums = []
        for score in choice.scores:
            source = next(scored)
            mean = -math.inf if math.isnan(source.log_prob) else source.log_prob / len(source.tokens)
            sums.append(score + weight * mean)
        yield choice.texts[max(range(len(sums)), key=sums.__getitem__)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reverse", metavar="REVERSE", help="a run or model folder of the opposite direction")
    parser.add_argument("n_best", type=Path, metavar="N_BEST", help="of `mtrain translate --json --n-best N`")
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help="the lines it is of")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="one line for each")
    parser.add_argument("--weight", type=float, default=0.07, help="of the reverse model [default: 0.07]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [default: auto]")
    given = parser.parse_args()
    if not 0 <= given.weight < math.inf:
        parser.error(f"--weight {given.weight}: give a number from 0 on")
    with failures_as_exits():
        require_folder_of(given.output)
        require_other_file(given.output, [given.n_best, given.input])
        reverse = Translator.load(given.reverse, given.device)
        chosen = rerank(reverse, read_choices(given.input, given.n_best), given.weight)
        write_atomically(given.output, "".join(f"{text}\n" for text in chosen))


if __name__ == "__main__":
    main()
