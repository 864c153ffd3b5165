"""Scores of given translations, and the cross-attention between a source and its translation."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice, tee, zip_longest

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mtrain.config.sections.corpora import TsvCorpus
from mtrain.data.reading.records import count_signs, show_csv, try_pair
from mtrain.decoding.batches import in_batches, padded
from mtrain.decoding.decode import NOT_FINITE
from mtrain.decoding.search.forced import cross_attention, forced_log_probs
from mtrain.decoding.split import windows_of_pairs
from mtrain.decoding.translate import Translator
from mtrain.decoding.translation import json_line
from mtrain.errors import DataError, ModelError

log = logging.getLogger(__name__)

_HEAD = 1000  # lines that tell whether fields are in quotes
Pairs = Iterable[tuple[str, str]]  # sources and targets
Progress = Callable[[int], object]  # called with a number of pairs
ScorePairs = Callable[[Iterator[tuple[str, str]]], Iterable[float]]  # scores of pairs


@dataclass(frozen=True)
class Scored:
    """The score of a given translation; NaN without tokens if a side exceeds the model's maximum length."""

    log_prob: float  # nats, EOS included
    tokens: list[str]  # the last is EOS
    token_log_probs: list[float]

    def line(self) -> str:
        """Log-probability, number of tokens, and the tokens' log-probabilities, separated by tabs."""
        steps = " ".join(f"{value:.4f}" for value in self.token_log_probs)
        return f"{self.log_prob:.6f}\t{len(self.tokens)}\t{steps}\n"

    @property
    def mean_log_prob(self) -> float:
        """The log-probability of a token on average: minus the cross-entropy, in nats."""
        return self.log_prob / len(self.tokens) if self.tokens else math.nan

    def as_json(self) -> str:
        """All fields, including the tokens, as one line of JSON with null for NaN."""
        return json_line(asdict(self))


def score_pairs(
    translator: Translator, pairs: Pairs, progress: Progress = lambda _: None
) -> Iterator[Scored]:
    """Yield the score of each (source, target) pair of lines, in order, in bounded memory. `progress` is
    called with the number of pairs whenever some are scored.

    Raises ModelError if the model's outputs are not finite.
    """
    first = 0
    for sources, targets in windows_of_pairs(pairs):
        yield from _score(translator, translator.splitter.encode(sources, first), targets, progress)
        first += len(sources)


def filter_scores(
    translator: Translator, reverse: Translator | None, pairs: Pairs, progress: Progress = lambda _: None
) -> Iterator[float]:
    """A number for each (source, target) pair by which `data.filters.min_score` can filter.

    It is the mean log-probability of a token of the target. With a model of the `reverse` direction, it is
    exp(-(|a - b| + (a + b) / 2)), in (0, 1], where a and b are the cross-entropies of the two models (dual
    conditional cross-entropy, Junczys-Dowmunt 2018). `progress` is as in `score_pairs`, for each model.
    """
    if reverse is None:
        return (scored.mean_log_prob for scored in score_pairs(translator, pairs, progress))
    pairs, others = tee(pairs)
    swapped = ((target, source) for source, target in others)
    ours, theirs = score_pairs(translator, pairs, progress), score_pairs(reverse, swapped, progress)
    return (_dual_score(*both) for both in zip(ours, theirs, strict=True))


def with_column(lines: Iterable[str], name: str, values: ScorePairs, quotes: bool) -> Iterator[str]:
    """Yield each line of a TSV file with one more column and a line end: what `values` returns for its first
    two columns. With `quotes`, these may be in double quotes; otherwise, a warning is logged if they seem to
    be. Blank lines at the end are no pairs, and are yielded as they are. Raises DataError, which gives the
    `name` of the file, if another line has less than two columns."""
    lines = iter(lines)
    head = [*islice(lines, _HEAD)]
    if not quotes and show_csv(count_signs(chain.from_iterable(line.split("\t")[:2] for line in head))):
        log.warning("%s: the fields seem to be in quotes, as csv writers write them; give --quotes", name)
    texts, pairs = tee(chain(head, lines))
    for text, value in zip_longest(texts, values(_first_columns(pairs, name, quotes))):
        yield f"{text}\n" if value is None else f"{text}\t{value:.6f}\n"


def _first_columns(lines: Iterable[str], name: str, quotes: bool) -> Iterator[tuple[str, str]]:
    corpus, blank = TsvCorpus(tsv=name, quotes=quotes), 0
    for number, line in enumerate(lines, 1):
        if not line.strip(" \r"):
            blank += 1  # an error only if other lines follow
            continue
        pair = try_pair("" if blank else line, corpus, name, number - blank, None)
        if isinstance(pair, DataError):
            raise pair
        yield pair[0], pair[1]


def _dual_score(one: Scored, other: Scored) -> float:
    a, b = -one.mean_log_prob, -other.mean_log_prob
    return math.exp(-(abs(a - b) + (a + b) / 2))


def _score(
    translator: Translator, source: list[list[int]], targets: list[str], progress: Progress
) -> list[Scored]:
    """The scores of targets for the ids of sources. The code of a language at the beginning of a target is
    not scored."""
    splitter, longest = translator.splitter, translator.max_length
    target, codes = splitter.encode_target(targets), len(splitter.tags.target)
    longer = [max(map(len, sides)) for sides in zip(source, target, strict=True)]
    fitting = [row for row, length in enumerate(longer) if length <= longest]
    progress(len(source) - len(fitting))
    results, pieces = [Scored(math.nan, [], [])] * len(source), translator.tokenizer.target.pieces
    for batch in in_batches([longer[row] for row in fitting], translator.decoding.moderate_batch_tokens):
        rows = [fitting[i] for i in batch]
        source_ids, source_keep = _padded(translator, [source[i] for i in rows])
        target_ids, _ = _padded(translator, [target[i] for i in rows])
        log_probs = forced_log_probs(translator.models, source_ids, source_keep, target_ids)
        for row, values in zip(rows, log_probs.tolist(), strict=True):
            steps = values[codes : len(target[row])]
            if not all(map(math.isfinite, steps)):
                raise ModelError(NOT_FINITE)
            results[row] = Scored(sum(steps), [pieces[i] for i in target[row][codes:]], steps)
        progress(len(rows))
    return results


def _padded(translator: Translator, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    return padded(rows, translator.tokenizer.special.pad, translator.device)


def attention(
    translator: Translator, source: str, target: str
) -> tuple[list[str], list[str], npt.NDArray[np.float32]]:
    """The tokens of a source and of its translation, EOS included, and the cross-attention weights (T, S) of
    the layer that alignments are taken from, averaged over models and, unless the model has an alignment
    head, over heads. Both texts are cut at the model's maximum length."""
    tokenizer, splitter, longest = translator.tokenizer, translator.splitter, translator.max_length
    [source_ids] = splitter.encode([source], most=longest)
    [target_ids] = splitter.encode_target([target], longest)
    rows, keep = _padded(translator, [source_ids])
    targets, _ = _padded(translator, [target_ids])
    layer = translator.decoding.alignment_layer
    matrix = cross_attention(translator.models, rows, keep, targets, layer)[0].float().cpu().numpy()
    sides = (tokenizer.source, source_ids), (tokenizer.target, target_ids)
    source_tokens, target_tokens = ([side.pieces[i] for i in ids] for side, ids in sides)
    return source_tokens, target_tokens, matrix
