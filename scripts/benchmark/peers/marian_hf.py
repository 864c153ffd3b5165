"""Hugging Face's MarianMTModel in a plain loop. As in mtrain, attention weights have no dropout."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from benchmark.job import TrainingJob, answer_with
from benchmark.peers.batches import PeerBatch
from benchmark.peers.loop import train


def measure(job: TrainingJob) -> dict[str, Any]:
    """Train for the time span of the job."""
    torch.manual_seed(job.seed)
    model = MarianMTModel(marian_config(job.model))
    return train(job, model, partial(marian_logits, model))


def marian_logits(model: MarianMTModel, batch: PeerBatch) -> Tensor:
    """Logits (B, T, V)."""
    output = model(
        input_ids=batch.source,
        attention_mask=batch.source_keep.long(),
        decoder_input_ids=batch.target_in,
        use_cache=False,
    )
    logits: Tensor = output.logits
    return logits


def marian_config(model: dict[str, Any]) -> MarianConfig:
    """The sizes and ids of mtrain's model."""
    shared = model["tie_embeddings"] == "all"
    sizes = {}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = model[f"{side}_layers"]
        sizes[f"{side}_attention_heads"] = model["heads"]
        sizes[f"{side}_ffn_dim"] = model["ffn_dim"]
    return MarianConfig(
        **sizes,
        vocab_size=model["source_vocab_size"],
        decoder_vocab_size=model["target_vocab_size"],
        d_model=model["d_model"],
        dropout=model["dropout"],
        activation_dropout=model["dropout"],
        attention_dropout=0.0,
        activation_function="relu",
        share_encoder_decoder_embeddings=shared,
        tie_word_embeddings=model["tie_embeddings"] != "none",
        scale_embedding=True,
        max_position_embeddings=model["max_positions"],
        pad_token_id=model["pad_id"],
        bos_token_id=model["bos_id"],
        eos_token_id=model["eos_id"],
        forced_eos_token_id=None,
        decoder_start_token_id=model["bos_id"],
    )


if __name__ == "__main__":
    answer_with(measure)
