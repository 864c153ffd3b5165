"""torch.nn.Transformer as in PyTorch's translation tutorial, in a plain loop.

It has a single dropout rate, which also applies to attention weights.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.job import TrainingJob, answer_with
from benchmark.peers.batches import PeerBatch
from benchmark.peers.loop import train


class TutorialTransformer(nn.Module):
    """Embeddings with sinusoidal positions, nn.Transformer, and a projection to the vocabulary."""

    positions: Tensor

    def __init__(self, model: dict[str, Any]):
        super().__init__()
        width, dropout = model["d_model"], model["dropout"]
        self.transformer = nn.Transformer(
            d_model=width,
            nhead=model["heads"],
            num_encoder_layers=model["encoder_layers"],
            num_decoder_layers=model["decoder_layers"],
            dim_feedforward=model["ffn_dim"],
            dropout=dropout,
            batch_first=True,
            norm_first=model["norm"] == "pre",
        )
        self.source_embedding = nn.Embedding(model["source_vocab_size"], width)
        self.target_embedding = nn.Embedding(model["target_vocab_size"], width)
        self.generator = nn.Linear(width, model["target_vocab_size"])
        if model["tie_embeddings"] != "none":
            self.generator.weight = self.target_embedding.weight
        if model["tie_embeddings"] == "all":
            self.source_embedding = self.target_embedding
        self.dropout = nn.Dropout(dropout)
        angles = torch.arange(model["max_positions"])[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, batch: PeerBatch) -> Tensor:
        """Logits (B, T, V). The masks of nn.Transformer are True at positions that are not attended."""
        length = batch.target_in.size(1)
        future = torch.ones(length, length, dtype=torch.bool, device=batch.labels.device).triu(1)
        hidden = self.transformer(
            self._embed(batch.source, self.source_embedding),
            self._embed(batch.target_in, self.target_embedding),
            tgt_mask=future,
            src_key_padding_mask=~batch.source_keep,
            tgt_key_padding_mask=~batch.target_keep,
            memory_key_padding_mask=~batch.source_keep,
        )
        return self.generator(hidden)  # type: ignore[no-any-return]

    def _embed(self, ids: Tensor, table: nn.Embedding) -> Tensor:
        scaled: Tensor = table(ids) * math.sqrt(table.embedding_dim)
        return self.dropout(scaled + self.positions[: ids.size(1)])  # type: ignore[no-any-return]


def measure(job: TrainingJob) -> dict[str, Any]:
    """Train for the time span of the job."""
    torch.manual_seed(job.seed)
    model = TutorialTransformer(job.model)
    return train(job, model, model)


if __name__ == "__main__":
    answer_with(measure)
