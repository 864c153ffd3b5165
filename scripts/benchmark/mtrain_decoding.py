"""Measures mtrain's own decoding, from source ids to text."""

from typing import Any

from benchmark.job import DecodingJob, answer_with
from benchmark.meter import time_decoding
from mtrain import Translator
from mtrain.decoding.batches import SHORT
from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.split import Part
from mtrain.device import keep_freed_memory


def decode(job: DecodingJob) -> dict[str, Any]:
    """Translate with the trained model."""
    exactly = {"max_length_ratio": 0.0, "max_length_offset": job.length, "min_length_offset": job.length}
    keep_freed_memory()  # as `mtrain translate` does
    loaded = Translator.load(job.model_dir, job.device)
    loaded = loaded.with_settings(**exactly, precision=job.precision, workers=job.workers or "auto")
    eos, settings = loaded.tokenizer.special.eos, {}

    def translate(sentences: list[list[int]], batch: int, beams: int) -> list[int]:
        if (batch, beams) not in settings:  # a budget that gives batches of this size on average
            tokens = sum(max(SHORT, len(ids) + 1) for ids in job.sentences) / len(job.sentences)
            budget = max(1, round(batch * beams * tokens)) if batch > 1 else 10**6
            settings[batch, beams] = loaded.with_settings(beam_size=beams, batch_tokens=budget)
        parts = [Part(row, [*ids, eos], [], (row, 0)) for row, ids in enumerate(sentences)]
        chosen = settings[batch, beams]
        found = chosen.workers.decode(DecodingTask(chosen.decoding, parts, chosen.target_lang, scored=False))
        return [best.tokens for [best] in found]

    if len(job.sentences) > 128:
        loaded.workers.start()  # the other tools have started their threads by now, too
    return time_decoding(job, translate)


if __name__ == "__main__":
    answer_with(decode, DecodingJob)
