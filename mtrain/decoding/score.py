"""What a model says of translations that are given: how likely they are, and where it looks."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import tee

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrain.decoding.decode import in_batches, padded
from mtrain.decoding.forced import force
from mtrain.decoding.split import WINDOW, windows
from mtrain.decoding.translate import Translator


@dataclass(frozen=True)
class Scored:
    """A given translation as the model sees it. All NaN and no tokens if a side is over the model's limit."""

    log_prob: float  # nats, EOS included
    tokens: list[str]  # pieces, the last of which is EOS
    token_log_probs: list[float]

    def line(self) -> str:
        """Log-probability, number of tokens, and the tokens' log-probabilities, between tabs."""
        steps = " ".join(f"{value:.4f}" for value in self.token_log_probs)
        return f"{self.log_prob:.6f}\t{len(self.tokens)}\t{steps}\n"

    def as_json(self) -> str:
        """The same with the tokens themselves, as one line of JSON; null stands for NaN."""
        log_prob = None if math.isnan(self.log_prob) else self.log_prob
        return json.dumps({**asdict(self), "log_prob": log_prob}, ensure_ascii=False) + "\n"


TOO_LONG = Scored(math.nan, [], [])


def score_pairs(translator: Translator, pairs: Iterable[tuple[str, str]]) -> Iterator[Scored]:
    """The log-probability of each (source, target) pair of lines, in order, in bounded memory."""
    ours, theirs = tee(pairs)
    for sources, targets in windows((s for s, _ in ours), (t for _, t in theirs), WINDOW):
        yield from _score(translator, sources, targets)


def _score(translator: Translator, sources: list[str], targets: list[str]) -> list[Scored]:
    tokenizer = translator.tokenizer
    eos, longest = tokenizer.special.eos, translator.max_length
    source = [[*ids, eos] for ids in tokenizer.encode_source(sources)]
    target = [[*ids, eos] for ids in tokenizer.encode_target(targets)]
    fitting = [
        i for i, sides in enumerate(zip(source, target, strict=True)) if max(map(len, sides)) <= longest
    ]
    results, pieces = [TOO_LONG] * len(source), tokenizer.target.pieces
    lengths = [max(len(source[i]), len(target[i])) for i in fitting]
    for batch in in_batches(lengths, translator.decoding.batch_tokens):
        rows = [fitting[i] for i in batch]
        log_probs = _force(translator, [source[i] for i in rows], [target[i] for i in rows]).double().cpu()
        for row, values in zip(rows, log_probs.tolist(), strict=True):
            steps = values[: len(target[row])]
            results[row] = Scored(sum(steps), [pieces[i] for i in target[row]], steps)
    return results


def _force(
    translator: Translator, source: list[list[int]], target: list[list[int]], seen: list[Tensor] | None = None
) -> Tensor:
    ids, device = translator.tokenizer.special, translator.device
    rows, keep = padded(source, ids.pad, device)
    return force(translator.decoder.models, rows, keep, padded(target, ids.pad, device)[0], seen)


def attention(
    translator: Translator, source: str, target: str
) -> tuple[list[str], list[str], npt.NDArray[np.float32]]:
    """The pieces of a source and of its translation, EOS included, and where the last layer looks when it
    says each of these: (T, S), rows that sum to 1. Both are segmented here, and cut at the model's limit."""
    tokenizer, eos = translator.tokenizer, translator.tokenizer.special.eos
    rows = [*tokenizer.encode_source([source])[0][: translator.max_length - 1], eos]
    said = [*tokenizer.encode_target([target])[0][: translator.max_length - 1], eos]
    seen: list[Tensor] = []
    _force(translator, [rows], [said], seen)
    matrix = torch.stack(seen).mean(dim=0)[0].float().cpu().numpy()
    return [tokenizer.source.pieces[i] for i in rows], [tokenizer.target.pieces[i] for i in said], matrix
