"""Whether CUDA graphs compute the same as the operations that they replace."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gpu.decoding import USES, Search, make_search
from gpu.scale import EOS, CheckFailed, Scale
from gpu.training import RATE, expect, make_learner
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.data.epochs.loader import StepInput

TOLERANCE = 0.01  # of the loss


def check_training(scale: Scale, preset: str, batch_tokens: list[int]) -> None:
    """Take the same steps with graphs, again with graphs, and without. Raises CheckFailed if the first two do
    not give the same bits, or the losses of the last two differ."""
    config = scale.model_config(preset)
    for tokens in batch_tokens:
        steps = scale.steps(config, tokens)
        once, again, eager = (_train(scale, config, steps, as_graphs) for as_graphs in (True, True, False))
        differences = [abs(a - b) / b for a, b in zip(once, eager, strict=True)]
        identical = "the same bits" if once == again else "other bits"
        print(
            f"{preset}, batch {tokens}: losses of {len(once)} steps with and without graphs differ by "
            f"{max(differences):.2g} at most; graphs gave {identical} again"
        )
        if once != again or not max(differences) <= TOLERANCE:
            raise CheckFailed("training with graphs gives other losses")


def _train(scale: Scale, config: ModelConfig, steps: Sequence[StepInput], as_graphs: bool) -> list[float]:
    """The losses of some steps."""
    learner = make_learner(scale, config, as_graphs)
    expect(learner, steps)
    return [float(learner.step(step.batches, step.tokens, RATE).values[0]) / step.tokens for step in steps]


def check_decoding(scale: Scale, preset: str) -> None:
    """Decode in sessions, and with the search of other devices. Raises CheckFailed if translations of any
    sentence differ in fp32. In bf16, some may differ: sums are in another order."""
    config = scale.model_config(preset)
    rows = [[*ids, EOS] for ids in scale.sentences(config, 8 if scale.tiny else 64)]
    options: dict[str, Any] = {"max_length_ratio": 0.0, "max_length_offset": scale.length}
    for dtype in (torch.float32, torch.bfloat16):
        by_step, in_sessions = (make_search(scale, config, dtype, each) for each in (False, True))
        for beams in (1, 5):
            work = partial(_translations, rows, DecodingConfig(beam_size=beams, **options))
            expected, found = work(by_step), [work(in_sessions) for _ in range(USES + 1)]
            different = sum(a != b for each in found for a, b in zip(each, expected, strict=True))
            name = f"{preset} {dtype}, beam {beams}".replace("torch.", "")
            print(f"{name}: {different} of {len(rows) * len(found)} translations differ from the search's")
            if different and dtype == torch.float32:
                raise CheckFailed("sessions give other translations")


def _translations(rows: list[list[int]], options: DecodingConfig, search_rows: Search) -> list[list[int]]:
    return [list(best.ids) for best, *_ in search_rows(rows, options)]
