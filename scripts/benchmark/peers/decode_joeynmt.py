"""JoeyNMT's search with its model with random weights, on given batches."""

from typing import Any

import torch
from joeynmt.model import build_model
from joeynmt.search import beam_search, greedy
from joeynmt.vocabulary import Vocabulary

from benchmark.job import DecodingJob, answer_with
from benchmark.meter import time_decoding
from benchmark.peers.joeynmt import SPECIAL, model_section

PAD, EOS = 1, 3  # JoeyNMT's ids


def decode(job: DecodingJob) -> dict[str, Any]:
    """Translate batches of sentences."""
    torch.manual_seed(1)
    model = _model(job).eval().to(job.device)
    usable = job.model["source_vocab_size"] - len(SPECIAL)

    def translate(sentences: list[list[int]], batch: int, beams: int) -> list[int]:
        lengths: list[int] = []
        for start in range(0, len(sentences), batch):
            rows = [[*(4 + i % usable for i in ids), EOS] for ids in sentences[start : start + batch]]
            counts = torch.tensor([len(row) for row in rows], device=job.device)
            longest = int(counts.max())
            source = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows], device=job.device)
            mask = (source != PAD).unsqueeze(1)
            output, hidden, _, _ = model(return_type="encode", src=source, src_length=counts, src_mask=mask)
            common = {"model": model, "encoder_output": output, "encoder_hidden": hidden, "src_mask": mask}
            common |= {"max_output_length": job.length, "min_output_length": job.length}
            if beams == 1:
                found = greedy(**common)[0]
            else:
                found = beam_search(**common, beam_size=beams, alpha=1.0, n_best=1)[0]
            lengths += [found.shape[1]] * len(rows)
        return lengths

    kind = torch.device(job.device).type
    with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=job.precision == "bf16"):
        return time_decoding(job, translate)


def _model(job: DecodingJob) -> torch.nn.Module:
    class Symbols:
        """Special symbols as in JoeyNMT's configuration."""

    symbols = Symbols()
    for number, (name, token) in enumerate(SPECIAL.items()):
        setattr(symbols, f"{name}_token", token)
        setattr(symbols, f"{name}_id", number)
    symbols.sep_token = symbols.sep_id = None  # type: ignore[attr-defined]
    symbols.lang_tags = []  # type: ignore[attr-defined]
    sides = [
        Vocabulary([f"w{i}" for i in range(job.model[f"{side}_vocab_size"] - len(SPECIAL))], symbols)
        for side in ("source", "target")
    ]
    if job.model["tie_embeddings"] == "all":
        sides[1] = sides[0]
    model: torch.nn.Module = build_model(model_section(job.model), *sides)
    return model


if __name__ == "__main__":
    answer_with(decode, DecodingJob)
