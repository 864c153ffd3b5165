"""The speed of decoding with random weights: the search of mtrain, on a GPU in sessions, and `generate` of
Transformers.

All translations have the same length, so that all tools take the same number of steps. There is no text:
neither tokenization nor the overlap of batches is measured.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark.job import DecodingJob
from benchmark.meter import time_decoding

from gpu.scale import EOS, Scale
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.decoding.batches import padded
from mtrain.decoding.search.beam import Hypothesis
from mtrain.decoding.search.search import search
from mtrain.decoding.sessions.inputs import Batch
from mtrain.decoding.sessions.sessions import Sessions
from mtrain.model.incremental import DecodingTransformer

REPEATS = 10  # batches that are timed
SETTINGS = [
    (64, 1),
    (64, 5),
    (512, 1),
    (512, 5),
    (2048, 1),
    (1, 1),
    (1, 5),
]  # sentences in a batch, beam size
USES = 2  # of a session before all of its graphs are captured

# Searches a batch of source ids, each with EOS.
Search = Callable[[list[list[int]], DecodingConfig], list[list[Hypothesis]]]


def make_search(scale: Scale, config: ModelConfig, dtype: torch.dtype, in_sessions: bool) -> Search:
    """The search of a model with random weights, in sessions, or one operation after another."""
    model = DecodingTransformer(scale.model(config).eval(), dtype, low_projection=True)
    sessions = Sessions([model])

    def search_rows(rows: list[list[int]], options: DecodingConfig) -> list[list[Hypothesis]]:
        if in_sessions and (found := sessions.search(Batch(rows, options))) is not None:
            return found
        source, keep = padded(rows, config.pad_id, scale.device, 4)  # (B, S)
        return search([model], source, keep, options, scored=options.beam_size > 1)

    return search_rows


def translate(
    search_rows: Search, length: int, sentences: Sequence[Sequence[int]], batch: int, beams: int
) -> list[int]:
    """Translate sentences into `length` tokens each, `batch` at a time. Returns the lengths of the best
    hypotheses."""
    exactly: dict[str, Any] = {
        "max_length_ratio": 0.0,
        "max_length_offset": length,
        "min_length_offset": length,
    }
    options, lengths = DecodingConfig(beam_size=beams, **exactly), []
    for start in range(0, len(sentences), batch):
        found = search_rows([[*ids, EOS] for ids in sentences[start : start + batch]], options)
        lengths += [len(best.ids) + best.finished for best, *_ in found]
    return lengths


def _job(scale: Scale, config: ModelConfig, batch: int, beams: int) -> DecodingJob:
    batch = min(batch, 20) if scale.tiny else batch
    batches = 1 if scale.tiny else REPEATS
    if batch == 1:  # `time_decoding` takes every tenth sentence
        sentences = scale.sentences(config, 10 * 2 * batches)
    else:
        sentences = scale.sentences(config, batch) * batches
    return DecodingJob(
        model_dir="",
        sentences=sentences,
        settings=[(batch, beams)],
        length=scale.length,
        device=str(scale.device),
        precision="bf16",
        workers=1,
        model=config.model_dump(mode="json"),
    )


def _print(name: str, job: DecodingJob, result: dict[str, Any]) -> None:
    for setting in result["settings"]:
        batch, beams, speed = setting["batch"], setting["beams"], setting["sentences_per_second"]
        print(
            f"{name}, {batch} sentence{'s' * (batch > 1)}, beam {beams}: {speed * job.length:,.0f} tokens/s, "
            f"{1000 * batch / speed / job.length:.2f} ms/step",
            flush=True,
        )


def measure(scale: Scale, preset: str) -> None:
    """Print the speed of mtrain's search, and on a GPU where the host waits for it."""
    config = scale.model_config(preset)
    work = partial(translate, make_search(scale, config, torch.bfloat16, scale.on_gpu), scale.length)
    for batch, beams in SETTINGS:
        job = _job(scale, config, batch, beams)
        for _ in range(USES if scale.on_gpu else 0):
            work(job.sentences[::10] if batch == 1 else job.sentences[:batch], batch, beams)
        _print(f"mtrain {preset} decoding bf16", job, time_decoding(job, work))
    if scale.on_gpu:
        for beams in (1, 5):
            _print_waits(scale, partial(work, scale.sentences(config, 64), 64, beams), beams)


def _print_waits(scale: Scale, work: Callable[[], object], beams: int) -> None:
    """Print the lines at which the host waits for the GPU while a batch is decoded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)
    )
    waits = ", ".join(f"{place} {count}" for place, count in places.most_common())
    print(f"waits in {scale.length} steps, beam {beams}: {places.total()} ({waits})", flush=True)


def measure_transformers(scale: Scale, preset: str) -> None:
    """Print the speed of Transformers' `generate` with its cache."""
    from benchmark.peers.decode_marian_hf import time_generation
    from benchmark.peers.marian_hf import marian_config
    from transformers import MarianMTModel  # takes seconds

    torch.backends.cuda.enable_cudnn_sdp(True)  # as PyTorch chooses, unlike mtrain
    config = scale.model_config(preset)
    torch.manual_seed(1)
    model: Any = MarianMTModel(marian_config(config.model_dump(mode="json")))
    model = model.eval().to(scale.device, torch.bfloat16)
    for batch, beams in ((64, 1), (64, 5), (512, 1), (512, 5)):
        job = _job(scale, config, batch, beams)
        with torch.inference_mode():
            _print(f"Transformers' Marian {preset} decoding bf16", job, time_generation(job, model))
