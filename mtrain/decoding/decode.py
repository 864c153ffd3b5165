"""From batches of source ids to translations: search, rank, align, detokenize."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.alignment import Alignment, align, words_at
from mtrain.decoding.batches import padded, position_limit
from mtrain.decoding.search.beam import Hypothesis
from mtrain.decoding.search.forced import cross_attention
from mtrain.decoding.search.mbr import rank, sentence_metric
from mtrain.decoding.search.search import search
from mtrain.decoding.sessions.inputs import Batch
from mtrain.decoding.sessions.sessions import Sessions
from mtrain.decoding.split import Part
from mtrain.decoding.translation import Translation
from mtrain.errors import ModelError, UsageError
from mtrain.model.incremental import DecodingTransformer, Models
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer

# Sources are padded to multiples of this. On a CPU, the last one to three rows of a matrix are multiplied by
# other instructions, so the last bits of scores would depend on the longest source of the batch. They still
# can if the model has learned positions, whose number limits padding.
_SOURCE_MULTIPLE = 4

NOT_FINITE = "the model's outputs are not finite; its weights are damaged, or try fp32 precision"


AnyTransformer = TypeVar("AnyTransformer", Transformer, DecodingTransformer)


class Ensemble(NamedTuple, Generic[AnyTransformer]):
    """One or more models that decode together, and their tokenizer."""

    models: Sequence[AnyTransformer]
    tokenizer: Tokenizer
    device: torch.device
    sessions: Sessions | None = None  # search on a CUDA device; freed with the ensemble
    search: "Search | None" = None  # by another program


DecodingEnsemble = Ensemble[DecodingTransformer]  # prepared for decoding


class DecodingTask(NamedTuple):
    """Parts to decode, and what is wanted of each.

    Its fields have types that pydantic serializes without calling Python, such as lists: an interrupt in such
    a call would become an error of pydantic.
    """

    config: DecodingConfig
    parts: list[Part]
    target_lang: str  # of lines without a language tag of their own
    n_best: int = 1  # translations of each part
    alignments: bool = False
    scored: bool = True  # if False, scores and log-probabilities are NaN, and greedy search is faster


Search = Callable[[DecodingTask], list[list[Hypothesis]]]  # the best hypotheses of each part, best first


def for_decoding(ensemble: Ensemble[Transformer], precision: str) -> DecodingEnsemble:
    """The ensemble, which shares the parameters of the models, prepared for decoding in a precision
    (`fp32`, `bf16` or `fp16`). Several models compute logits in full precision, because `Predictor` corrects
    rounded logits only for a single model."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    is_single = len(ensemble.models) == 1
    models = [DecodingTransformer(model, dtype, low_projection=is_single) for model in ensemble.models]
    sessions = Sessions(models) if ensemble.device.type == "cuda" else None
    return Ensemble(models, ensemble.tokenizer, ensemble.device, sessions, ensemble.search)


def _metric(name: str, part: Part, task: DecodingTask) -> Any:
    """The metric of minimum Bayes risk decoding for the language of a part; that of the task if a tokenizer
    of the language is not installed."""
    if part.target_lang is not None:
        with suppress(UsageError):
            return sentence_metric(name, part.target_lang)
    return sentence_metric(name, task.target_lang)


def decode_batch(ensemble: DecodingEnsemble, task: DecodingTask) -> list[list[Translation]]:
    """Return up to `task.n_best` translations of each part, best first, with word alignments if requested.

    On a CPU the translations do not depend on which parts are decoded together; see `Translator.translate`.

    Raises ModelError if the model's outputs are not finite, UsageError if the constraints of `task.config`
    exclude every translation of a part.
    """
    config, parts = task.config, task.parts
    found = _search(ensemble, task)
    for row, part in enumerate(parts):
        possible = _possible(found[row], ensemble.models, config, part)
        if config.mbr is not None:
            texts = ensemble.tokenizer.decode([h.ids for h in possible])
            possible = [possible[i] for i in rank(texts, _metric(config.mbr, part, task))]
        found[row] = possible[: task.n_best]
    decoded = ensemble.tokenizer.decode([h.ids for hypotheses in found for h in hypotheses])
    alignments: Iterator[Alignment | None] = repeat(None)
    if task.alignments:
        alignments = iter(_align(ensemble, task, found, decoded))
    remaining = iter(decoded)

    def translation(h: Hypothesis) -> Translation:
        score, log_prob = (h.score, h.log_prob) if task.scored else (math.nan, math.nan)
        tokens = len(h.ids) + h.finished
        return Translation(next(remaining), score, log_prob, tokens, h.finished, next(alignments))

    return [[*map(translation, hypotheses)] for hypotheses in found]


def _search(ensemble: DecodingEnsemble, task: DecodingTask) -> list[list[Hypothesis]]:
    """The best hypotheses of each part, from another program or, if possible, from a session."""
    if ensemble.search is not None:
        return ensemble.search(task)
    config, parts = task.config, task.parts
    prefixes, keys = [part.prefix for part in parts], [part.key for part in parts]
    n_best = task.n_best if config.mbr is None else None
    if ensemble.sessions is not None:
        batch = Batch([part.source for part in parts], config, prefixes, keys, n_best)
        if (found := ensemble.sessions.search(batch)) is not None:
            return found
    return search(ensemble.models, *_sources(ensemble, parts), config, prefixes, keys, task.scored, n_best)


def _sources(ensemble: DecodingEnsemble, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Source ids (B, S) of parts on the device, and their mask (B, S)."""
    pad_id, most = ensemble.models[0].config.pad_id, position_limit(ensemble.models)
    return padded([part.source for part in parts], pad_id, ensemble.device, _SOURCE_MULTIPLE, most)


def _possible(
    hypotheses: list[Hypothesis], models: Models, config: DecodingConfig, part: Part
) -> list[Hypothesis]:
    """The hypotheses of a part that the constraints allow. Raises an error if there are none."""
    if hypotheses and all(math.isfinite(h.log_prob) for h in hypotheses):
        return hypotheses
    possible = [h for h in hypotheses if h.log_prob > -math.inf]
    min_length = config.min_length_offset or config.min_length_ratio
    constrained = bool(config.no_repeat_ngram or min_length or config.forbidden_ids)
    finite = all(h.log_prob < math.inf for h in hypotheses)  # False for NaN
    if not finite or not (possible or (constrained and _weights_are_finite(models))):
        raise ModelError(NOT_FINITE)
    if not possible:
        line = part.key[0] + 1
        raise UsageError(f"the decoding constraints exclude every translation of line {line}; relax them")
    return possible


def _weights_are_finite(models: Models) -> bool:
    return all(bool(weight.isfinite().all()) for model in models for weight in model.transformer.parameters())


def _align(
    ensemble: DecodingEnsemble, task: DecodingTask, found: list[list[Hypothesis]], decoded: Sequence[str]
) -> list[Alignment]:
    """Word alignments of all hypotheses, from the attention of forced decoding. `decoded` are their texts."""
    most, tokenizer = max(map(len, found)), ensemble.tokenizer
    filled = [[*hypotheses, *[hypotheses[0]] * (most - len(hypotheses))] for hypotheses in found]
    rows = [h.ids or [tokenizer.special.eos] for hypotheses in filled for h in hypotheses]
    targets = padded(rows, tokenizer.special.pad, ensemble.device)[0]
    weights = cross_attention(
        ensemble.models, *_sources(ensemble, task.parts), targets, task.config.alignment_layer
    )
    attention = weights.float().cpu().numpy()  # (B * most, T, S)
    texts, aligned = iter(decoded), []
    for row, (part, hypotheses) in enumerate(zip(task.parts, found, strict=True)):
        for k, h in enumerate(hypotheses):
            words = words_at(next(texts), tokenizer.target.decoded_positions(h.ids))
            aligned.append(align(attention[row * most + k], part.words, words))
    return aligned
