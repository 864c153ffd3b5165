"""The pair classifier. Symbols in shapes: see `mtrain.model`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.config.sections.model import ModelConfig
from mtrain.kernels.cross_entropy import IGNORE, LossSums
from mtrain.kernels.precision import without_autocast
from mtrain.kernels.sequences import Sequences
from mtrain.model.transformer import Dropout, Encoder, Linear, initialize


class PairClassifier(Encoder):
    """Tells good sentence pairs from bad ones: an encoder over "source EOS target EOS", the mean of its
    output, and a linear layer.

    As in BERT (Devlin et al. 2019, section 3), each token has an embedding of the segment that it belongs to,
    source or target. The positions of the target start at 0 again, so that tokens and their translations have
    similar positions, as in translation language modeling (Conneau and Lample, "Cross-lingual Language Model
    Pretraining", 2019); rotary positions do not start again, because they are relative. The mean over all
    tokens was better than the first token in Reimers and Gurevych, "Sentence-BERT", 2019, section 6.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.segment_embedding = nn.Embedding(2, config.d_model)
        self.pooled_dropout = Dropout(config.dropout)
        self.classifier = Linear(config.d_model, 1)
        initialize(self)

    def forward(self, source: Tensor, sources: Sequences, *_: object) -> Tensor:
        """Log-odds (B) that pairs are good, for their ids "source EOS target EOS" (P). Further inputs, the
        targets, are not used."""
        x = self.encode_tokens(source, sources)
        with without_autocast(x):  # rounded log-odds would be equal for many pairs
            pooled = sources.mean(x)  # (B, E)
            return self.classifier(self.pooled_dropout(pooled)).squeeze(1)  # type: ignore[no-any-return]

    def positions_of(self, ids: Tensor, sources: Sequences) -> Tensor:
        """Embeddings of the position of each token, which starts again in the target, and of its segment. For
        the shape, see `by_row`."""
        ends = (ids == self.config.eos_id).int()
        in_target = sources.sum_before(ends).clamp(max=1)  # (P): 1 after the first EOS
        place_in_target = sources.by_row(sources.sum_before(in_target))
        in_target = sources.by_row(in_target)
        segments: Tensor = self.segment_embedding(in_target) * math.sqrt(self.config.d_model)
        table = self.embed.positions(0, sources.longest, self.learned_positions)
        if table is None:
            return segments
        places = torch.where(in_target > 0, place_in_target, sources.positions(ids.device))
        return table[places.clamp(max=len(table) - 1)] + segments  # as learned ones are limited

    def loss(self, outputs: Tensor, labels: Tensor, smoothing: float, targets: Sequences) -> LossSums:
        """Binary cross-entropy of log-odds (B) for the classes, which are the first labels of the targets, 1
        if a pair is good. Label smoothing is as in `torch.nn.functional.cross_entropy` with two classes."""
        classes = targets.first(labels.flatten(), IGNORE)
        keep = classes != IGNORE
        target = classes.clamp(min=0).to(outputs.dtype)
        smoothed = target * (1 - smoothing) + smoothing / 2
        losses = F.binary_cross_entropy_with_logits(outputs, smoothed, reduction="none")
        nlls = F.binary_cross_entropy_with_logits(outputs.detach(), target, reduction="none")
        return LossSums((losses * keep).sum(), (nlls * keep).sum())

    def start_from(self, other: nn.Module) -> None:
        """Copy the weights that both models have, from another classifier or from the encoder of a
        Transformer."""
        own = self.state_dict().keys()
        self.load_state_dict({n: t for n, t in other.state_dict().items() if n in own}, strict=False)
