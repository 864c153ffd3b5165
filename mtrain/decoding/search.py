"""Translations of a batch: greedy, sampled, or by beam search. Letters in shapes: see `mtrain.model`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtrain.config.schema import DecodingConfig
from mtrain.decoding.beam import beam_search
from mtrain.decoding.constraints import Constraints
from mtrain.decoding.hypothesis import Hypothesis
from mtrain.decoding.predictor import Predictor, keep_going
from mtrain.decoding.sample import draw, uniform_numbers
from mtrain.errors import UsageError
from mtrain.model.transformer import Transformer


@torch.inference_mode()
def search(
    models: Sequence[Transformer],
    source: Tensor,
    source_keep: Tensor,
    config: DecodingConfig,
    prefixes: Sequence[Sequence[int]] | None = None,
    keys: Sequence[tuple[int, ...]] = (),
    scored: bool = True,
) -> list[list[Hypothesis]]:
    """The best hypotheses of each of B sentences, best first: up to `beam_size`, or `samples` if sampled.
    If they are not to be `scored`, which saves greedy search some work, their scores are -inf where all is
    barred, NaN or inf where the model is broken, and mean nothing else.

    Raises UsageError if a prefix is too long for the model.

    `source` (B, S) ids that end in EOS; `source_keep` (B, S) True at tokens. The models, an ensemble if they
    are several, are in eval mode. `prefixes` are ids that the translations begin with; `keys` tell the
    sentences' random numbers apart.
    """
    ids = models[0].config
    lengths = source_keep.sum(1).double()
    limits = (lengths * config.max_length_ratio + config.max_length_offset).long()  # (B,)
    longest = min((m.config.max_positions for m in models if m.config.positions == "learned"), default=None)
    if prefixes is not None and any(prefixes):  # what is given must fit, and leave room
        given = torch.tensor([len(prefix) for prefix in prefixes], device=limits.device)
        if longest is not None and int(given.max()) >= longest:
            raise UsageError(f"a prefix of {int(given.max())} tokens; the model has positions for {longest}")
        limits = limits.maximum(torch.where(given > 0, given + config.max_length_offset, 0))
    if longest is not None:
        limits = limits.clamp(max=longest)
    constraints = Constraints(config, lengths, limits, ids, prefixes)
    steps = int(limits.max())
    if config.samples is None and (config.beam_size > 1 or config.coverage_penalty):
        predictor = Predictor(models, source, source_keep, config.beam_size, steps)
        return beam_search(predictor, source_keep, limits, config, constraints)
    rows = config.samples or 1
    predictor = Predictor(models, source, source_keep, rows, steps)
    if config.samples is None:
        plain = not scored and not config.force_eos

        def choose(logits: Tensor, before: Tensor, sentences: Tensor) -> tuple[Tensor, Tensor]:
            if plain:
                constraints.bar_(logits, before, sentences)
                return predictor.best(logits)
            totals = constraints.normalizer_(logits, before, sentences)
            scores, _, tokens = predictor.candidates(logits, totals, logits.new_zeros(len(logits), 1), 1)
            return tokens[:, 0], scores[:, 0]
    else:
        numbers = uniform_numbers(config.seed, keys, rows, steps).to(source.device)

        def choose(logits: Tensor, before: Tensor, sentences: Tensor) -> tuple[Tensor, Tensor]:
            totals = constraints.normalizer_(logits, before, sentences)
            drawn = draw(logits, numbers[sentences, :, before.size(2)].flatten(), config)[:, None]
            return drawn.squeeze(1), (logits.gather(1, drawn) - totals).squeeze(1)

    found = _follow(predictor, limits, rows, choose)
    return _hypotheses(*found, limits, config.length_penalty, ids.eos_id)


def _follow(
    predictor: Predictor,
    limits: Tensor,
    rows: int,
    choose: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Let `choose` pick tokens, with their log-probabilities, (N) both, by logits (N, V), the tokens before
    (B', R, t) and the sentences (B') that they are of, until EOS or `limits` (B) tokens in all of the `rows`
    (R) of each sentence: tokens (B, R, T), log-probabilities (B, R).
    """
    ids, sentences, steps = predictor.ids, len(limits), int(limits.max())
    found = limits.new_full((sentences, rows, steps), ids.pad_id)
    gains: Tensor | None = None
    going = torch.arange(sentences, device=limits.device)
    # Of those going, so that a step need not pick them from the others:
    tokens, left, sums = found.clone(), limits, torch.empty(0)
    alive = torch.ones(sentences, rows, dtype=torch.bool, device=limits.device)
    all_alive = True  # False, too, where to know it would be to wait for the device once more
    last = limits.new_full((sentences * rows,), ids.bos_id)
    for step in range(steps):
        logits = predictor.next(last)
        if gains is None:
            gains, sums = logits.new_zeros(2, sentences, rows)
        last, gained = choose(logits, tokens[:, :, :step], going)
        chosen, gained = last.view(-1, rows), gained.view(-1, rows)
        if not all_alive:
            chosen, gained = chosen.masked_fill(~alive, ids.pad_id), gained.masked_fill(~alive, 0)
        sums += gained
        tokens.select(2, step).copy_(chosen)
        alive &= (chosen != ids.eos_id) & (step + 1 < left)[:, None]
        some_alive = alive.any(dim=1)
        count = int(some_alive.sum())
        all_alive = rows == 1 and count == len(alive)
        stay = keep_going(some_alive, count)
        if stay is None:
            continue
        found[going], gains[going] = tokens, sums
        if not len(stay):
            break
        going, tokens, left, sums, alive = (x[stay] for x in (going, tokens, left, sums, alive))
        all_alive, last = rows == 1, last.view(-1, rows)[stay].flatten()
        predictor.reorder(torch.arange(rows, device=limits.device).expand(len(stay), -1), stay)
    assert gains is not None
    return found, gains


def _hypotheses(
    tokens: Tensor, log_probs: Tensor, limits: Tensor, length_penalty: float, eos_id: int
) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence, best first, of tokens (B, R, T) with log-probabilities (B, R)."""
    found = []
    for rows, limit, totals in zip(tokens.tolist(), limits.tolist(), log_probs.tolist(), strict=True):
        of_sentence = []
        for row, log_prob in zip(rows, totals, strict=True):
            finished = eos_id in row[:limit]
            length = row.index(eos_id) + 1 if finished else limit
            score = log_prob / length**length_penalty
            of_sentence.append(Hypothesis(row[: length - finished], log_prob, score, finished))
        found.append(sorted(of_sentence, key=lambda hypothesis: -hypothesis.score))
    return found
