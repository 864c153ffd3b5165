"""Greedy search, sampling and beam search for a batch of sentences. Symbols in shapes: see `mtrain.model`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.batches import position_limit
from mtrain.decoding.search.beam import Hypothesis, beam_search
from mtrain.decoding.search.constraints import Constraints
from mtrain.decoding.search.predictor import Predictor, log_probs_of, remaining_sentences
from mtrain.decoding.search.sample import draw, noise_keys
from mtrain.kernels.precision import widest_float
from mtrain.model.incremental import DecodingTransformer, Models


@torch.inference_mode()
def search(
    models: Models,
    source: Tensor,
    source_keep: Tensor,
    config: DecodingConfig,
    prefixes: Sequence[Sequence[int]] | None = None,
    keys: Sequence[tuple[int, ...]] = (),
    scored: bool = True,
    n_best: int | None = None,
) -> list[list[Hypothesis]]:
    """Return the best hypotheses of each of B sentences, best first: of beam search up to `n_best` (None:
    `beam_size`), otherwise up to `samples`.

    `source` (B, S) contains ids that end with EOS; `source_keep` (B, S) is True at tokens. Several models
    form an ensemble; all are in eval mode. `prefixes` are ids that the translations begin with, fewer than
    the models have positions. `keys` identify the sentences for the random numbers of sampling.

    Without `scored`, greedy search skips the normalizers, and log-probabilities only indicate failures: -inf
    if all tokens were forbidden, NaN or inf if the model's outputs are not finite.
    """
    lengths = source_keep.sum(1).to(widest_float(source.device))
    max_lengths = maximum_lengths(models, lengths, config, prefixes)
    constraints = Constraints(config, lengths, max_lengths, models[0].config, prefixes)
    steps = int(max_lengths.max())
    predictor = Predictor(models, source, source_keep, config.hypotheses, steps)
    if config.samples is None and (config.beam_size > 1 or config.coverage_penalty):
        return beam_search(predictor, source_keep, constraints).hypotheses(n_best)
    noise = None
    if config.samples is not None:
        noise = noise_keys(config.seed, keys, config.samples, steps).to(source.device)
    scored = scored or config.force_eos
    tokens, log_probs = _generate(predictor, constraints, noise, scored)
    eos_id = predictor.model_config.eos_id
    return ranked_hypotheses(tokens, log_probs, max_lengths, config.length_penalty, eos_id)


def best_ids(
    model: DecodingTransformer, row: Sequence[int], config: DecodingConfig, prefix: Sequence[int] = ()
) -> list[int]:
    """The ids, without EOS, of the best translation of one sentence, whose source ids are given."""
    source = torch.tensor([row])
    [[best, *_]] = search([model], source, torch.ones_like(source, dtype=torch.bool), config, [prefix])
    return best.ids


def maximum_lengths(
    models: Models, lengths: Tensor, config: DecodingConfig, prefixes: Sequence[Sequence[int]] | None
) -> Tensor:
    """Maximum lengths (B) of the translations of sources with lengths (B), including EOS on both sides."""
    lengths = lengths.to(widest_float(lengths.device))  # in fp64, 100 * 1.15 is less than 115
    max_lengths = (lengths * config.max_length_ratio + config.max_length_offset).long()
    limit = position_limit(models)
    if prefixes is not None and any(prefixes):  # leave room for the prefix and tokens after it
        given = torch.tensor([len(prefix) for prefix in prefixes], device=lengths.device)
        max_lengths = max_lengths.maximum(torch.where(given > 0, given + config.max_length_offset, 0))
    return max_lengths if limit is None else max_lengths.clamp(max=limit)


def _generate(
    predictor: Predictor, constraints: Constraints, noise: Tensor | None, scored: bool
) -> tuple[Tensor, Tensor]:
    """Generate tokens until each of the R rows of each sentence has reached EOS or its maximum length.

    Tokens are drawn with the random numbers `noise` (B, R, steps) if given; otherwise the most probable ones
    are taken. Unless `scored`, their logits replace the log-probabilities. Returns tokens (B, R, T) and the
    sums of their log-probabilities (B, R), where the tokens of a prefix contribute 0.
    """
    model_config, rows, max_lengths = predictor.model_config, predictor.rows, constraints.max_lengths
    sentences, steps = len(max_lengths), int(max_lengths.max())
    all_tokens = max_lengths.new_full((sentences, rows, steps), model_config.pad_id)
    last = max_lengths.new_full((sentences * rows,), model_config.bos_id)
    logits = predictor.step(last)
    all_log_probs = logits.new_zeros(sentences, rows)
    active = torch.arange(sentences, device=max_lengths.device)  # sentences that are still in the batch
    # Of the active sentences:
    tokens, log_probs = all_tokens.clone(), all_log_probs.clone()
    limits = max_lengths
    unfinished = torch.ones(sentences, rows, dtype=torch.bool, device=max_lengths.device)
    for step in range(steps):
        if noise is None and not scored:
            constraints.mask_(logits, tokens[:, :, :step], active)
            last, gained = predictor.argmax(logits)
        else:
            log_normalizers = constraints.apply_(logits, tokens[:, :, :step], active)
            if noise is None:
                live = logits.new_zeros(len(logits), 1)
                gained, _, last = predictor.topk(logits, log_normalizers, live, 1)
            else:
                last = draw(logits, noise[active, :, step].flatten(), constraints.config)[:, None]
                gained = log_probs_of(predictor.models[0], predictor.hidden, logits, log_normalizers, last)
            last, gained = last[:, 0], gained[:, 0]
        chosen = last.view(-1, rows).masked_fill(~unfinished, model_config.pad_id)
        log_probs += gained.view(-1, rows).masked_fill(~unfinished, 0)
        constraints.make_prefix_certain_(log_probs, step + 1, active)
        tokens.select(2, step).copy_(chosen)
        unfinished &= (chosen != model_config.eos_id) & (step + 1 < limits)[:, None]
        remaining = remaining_sentences(unfinished.any(dim=1), rows)
        if remaining is not None:
            all_tokens[active], all_log_probs[active] = tokens, log_probs
            if not len(remaining):
                break
            active, unfinished = active[remaining], unfinished[remaining]
            tokens, log_probs = tokens[remaining], log_probs[remaining]
            limits = limits[remaining]
            last = last.view(-1, rows)[remaining].flatten()
            predictor.reorder(None, remaining)
        logits = predictor.step(last)
    return all_tokens, all_log_probs


def ranked_hypotheses(
    tokens: Tensor, log_probs: Tensor, max_lengths: Tensor, length_penalty: float, eos_id: int
) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence, best first, from tokens (B, R, T) and log-probabilities (B, R)."""
    found = []
    for rows, limit, sums in zip(tokens.tolist(), max_lengths.tolist(), log_probs.tolist(), strict=True):
        hypotheses = []
        for row, log_prob in zip(rows, sums, strict=True):
            length = row.index(eos_id) + 1 if eos_id in row else limit + 1
            finished, length = length <= limit, min(length, limit)
            score = log_prob / length**length_penalty
            hypotheses.append(Hypothesis(row[: length - finished], log_prob, score, finished))
        found.append(sorted(hypotheses, key=lambda hypothesis: -hypothesis.score))
    return found
