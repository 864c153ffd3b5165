"""Hugging Face's `generate` with its cache and a MarianMTModel with random weights."""

from typing import Any

import torch
from transformers import MarianMTModel

from benchmark.job import DecodingJob, answer_with
from benchmark.meter import time_decoding
from benchmark.peers.marian_hf import marian_config


def decode(job: DecodingJob) -> dict[str, Any]:
    """Translate batches of sentences."""
    torch.manual_seed(1)
    model: Any = MarianMTModel(marian_config(job.model))
    model = model.eval().to(job.device)
    kind = torch.device(job.device).type
    autocast = torch.autocast(kind, torch.bfloat16, enabled=job.precision == "bf16")
    with torch.inference_mode(), autocast:
        return time_generation(job, model)


def time_generation(job: DecodingJob, model: Any) -> dict[str, Any]:
    """Time a MarianMTModel that is on the device of the job, in the current mode."""
    pad, eos = job.model["pad_id"], job.model["eos_id"]

    def translate(sentences: list[list[int]], batch: int, beams: int) -> list[int]:
        lengths = []
        for start in range(0, len(sentences), batch):
            rows = [[*ids, eos] for ids in sentences[start : start + batch]]
            longest = max(map(len, rows))
            source = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=job.device)
            found = model.generate(
                input_ids=source,
                attention_mask=(source != pad).long(),
                num_beams=beams,
                do_sample=False,
                min_new_tokens=job.length,
                max_new_tokens=job.length,
            )
            lengths += [found.shape[1] - 1] * len(rows)
        return lengths

    return time_decoding(job, translate)


if __name__ == "__main__":
    answer_with(decode, DecodingJob)
