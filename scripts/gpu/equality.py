"""Whether CUDA graphs compute the same as the operations that they replace."""

from functools import partial

import torch

from gpu.decoding import USES, Search, make_search
from gpu.scale import EOS, CheckFailed, Scale
from mtrain.config.sections.decoding import DecodingConfig


def check_decoding(scale: Scale, preset: str) -> None:
    """Decode in sessions, and with the search of other devices. Raises CheckFailed if translations of any
    sentence differ in fp32. In bf16, some may differ: sums are in another order."""
    config = scale.model_config(preset)
    rows = [[*ids, EOS] for ids in scale.sentences(config, 8 if scale.tiny else 64)]
    options = {"max_length_ratio": 0.0, "max_length_offset": scale.length}
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
