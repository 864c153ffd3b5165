"""CTranslate2 with a MarianMTModel with random weights, converted by its own converter."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ctranslate2
import torch
from transformers import MarianMTModel

from benchmark.job import DecodingJob, answer_with
from benchmark.meter import time_decoding
from benchmark.peers.marian_hf import marian_config


def decode(job: DecodingJob) -> dict[str, Any]:
    """Translate batches of sentences; the workers of the job share the cores."""
    with TemporaryDirectory(prefix="mtrain-bench-") as folder:
        converted, words = _convert(job, Path(folder))
        cores, workers = len(os.sched_getaffinity(0)), job.workers or 1
        translator = ctranslate2.Translator(
            converted,
            device=job.device.partition(":")[0],
            device_index=int(job.device.partition(":")[2] or 0),
            compute_type={"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}[job.precision],
            inter_threads=workers,
            intra_threads=max(1, cores // workers),
        )

        def translate(sentences: list[list[int]], batch: int, beams: int) -> list[int]:
            found = translator.translate_batch(
                [[*(words[i] for i in ids), "</s>"] for ids in sentences],
                beam_size=beams,
                max_batch_size=batch,
                batch_type="examples",
                min_decoding_length=job.length,
                max_decoding_length=job.length,
            )
            return [len(each.hypotheses[0]) for each in found]

        return time_decoding(job, translate)


def _convert(job: DecodingJob, folder: Path) -> tuple[str, list[str]]:
    """The folder of the converted model, and the word for each id."""
    count = job.model["target_vocab_size"]
    words = ["</s>", "<unk>", *(f"w{i}" for i in range(count - 3)), "<pad>"]
    special = {
        "eos_id": 0,
        "unk_id": 1,
        "pad_id": count - 1,
        "bos_id": count - 1,
    }  # Marian starts with padding
    torch.manual_seed(1)
    MarianMTModel(marian_config({**job.model, **special})).save_pretrained(folder / "hf")
    (folder / "hf" / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    names = {"source_lang": "xx", "target_lang": "yy", "tokenizer_class": "MarianTokenizer"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(names))
    pieces = next((Path(job.model_dir) / "tokenizer").glob("*.model")).read_bytes()  # required but not used
    for name in ("source.spm", "target.spm"):
        (folder / "hf" / name).write_bytes(pieces)
    converter = ctranslate2.converters.TransformersConverter(str(folder / "hf"))
    converter.convert(str(folder / "ct2"), quantization="int8" if job.precision == "int8" else None)
    return str(folder / "ct2"), [words[2 + i % (count - 3)] for i in range(count)]


if __name__ == "__main__":
    answer_with(decode, DecodingJob)
