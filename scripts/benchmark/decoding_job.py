"""Translating a fixed set of sentences, in the same way for every tool: what a process is told and answers.

Every translation gets exactly `length` tokens, so that all tools do the same number of steps, whatever their
weights. Sentences are sorted, the longest first.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmark.meter import peak_mib

Sentences = list[list[int]]


@dataclass(frozen=True)
class DecodingJob:
    """One measurement of one tool."""

    model_dir: str  # of mtrain's model; others have weights of their own, of the same sizes
    sentences: Sentences  # source ids without EOS, the longest first
    settings: list[tuple[int, int]]  # (sentences in a batch, beams); a batch of 1 measures latency
    length: int  # tokens of each translation
    device: str  # cpu or cuda:N
    precision: str  # auto, fp32, bf16 or int8; how many threads of which kind is for each tool to say
    workers: int  # threads that translate side by side; the cores are shared among them
    model: dict[str, Any]  # the fields of ModelConfig


def measure(job: DecodingJob, translate: Callable[[Sentences, int, int], Sequence[int]]) -> dict[str, Any]:
    """Time `translate(sentences, batch, beams)`, which returns the lengths of the translations, once for
    each setting, after a short warm-up. Single sentences are timed over a tenth of the set."""
    results = []
    for batch, beams in job.settings:
        chosen = job.sentences if batch > 1 else job.sentences[::10]
        translate(chosen[: 2 * batch], batch, beams)
        start = time.perf_counter()
        if batch > 1:
            lengths = list(translate(chosen, batch, beams))
        else:
            lengths = [length for one in chosen for length in translate([one], 1, beams)]
        seconds = time.perf_counter() - start
        if lengths != [job.length] * len(chosen):
            raise RuntimeError(f"not all translations have {job.length} tokens")
        results.append({"batch": batch, "beams": beams, "sentences_per_second": len(chosen) / seconds})
    return {"settings": results, "peak_mib": peak_mib(torch.device(job.device))}
