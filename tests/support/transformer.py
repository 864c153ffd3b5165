"""Small Transformers, and copies of their weights in PyTorch's layers."""

import itertools

import torch
from torch import Tensor, nn

from mtrain.config.sections.model import ModelConfig
from mtrain.kernels.sequences import Padded
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.transformer import DecoderLayer, EncoderLayer, MultiHeadAttention, Transformer


def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    """Load our weights into torch's nn.MultiheadAttention."""
    theirs.in_proj_weight.data.copy_(ours.query_key_value.weight)
    theirs.in_proj_bias.data.copy_(ours.query_key_value.bias)
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def torch_attention(ours: MultiHeadAttention) -> nn.MultiheadAttention:
    """torch's nn.MultiheadAttention with our weights, in fp64 and eval mode."""
    width = ours.output.in_features
    theirs = nn.MultiheadAttention(width, ours.heads, batch_first=True, dtype=torch.float64).eval()
    copy_attention(ours, theirs)
    return theirs


def attend(
    layer: MultiHeadAttention,
    x: Tensor,
    memory: Tensor | None = None,
    keep: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Self-attention (N, T, E) of padded x (N, T, E), or attention to a memory (B, S, E); `keep` is the mask
    (B, S) of the keys."""
    keys = Padded.of(x if memory is None else memory, keep)
    queries = keys if memory is None else Padded.of(x)
    of_memory = None if memory is None else memory.flatten(0, 1)
    return layer(x.flatten(0, 1), queries, of_memory, keys, causal).view(x.shape)


def copy_layer(ours: EncoderLayer | DecoderLayer, theirs: nn.Module) -> None:
    """Load our weights into torch's nn.TransformerEncoderLayer or nn.TransformerDecoderLayer."""
    attentions = [(ours.self_attention, theirs.self_attn)]
    residuals = [ours.self_attention_residual]
    if isinstance(ours, DecoderLayer):
        attentions.append((ours.cross_attention, theirs.multihead_attn))
        residuals.append(ours.cross_attention_residual)
    for mine, other in attentions:
        copy_attention(mine, other)
    for i, residual in enumerate([*residuals, ours.feed_forward_residual], start=1):
        getattr(theirs, f"norm{i}").load_state_dict(residual.norm.state_dict())
    theirs.linear1.load_state_dict(ours.feed_forward.inner.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.outer.state_dict())


def their_arguments(ours: ModelConfig) -> dict[str, object]:
    """The arguments of torch's nn.Transformer layers for a model config."""
    return {
        "d_model": ours.d_model,
        "nhead": ours.heads,
        "dim_feedforward": ours.ffn_dim,
        "dropout": ours.dropout,
        "activation": ours.activation,
        "norm_first": ours.norm == "pre",
        "batch_first": True,
        "dtype": torch.float64,
    }


POSITIONS = ["sinusoidal", "sinusoidal_interleaved", "learned", "rotary"]
KINDS = [  # every combination of the options that change how logits are computed
    {"positions": positions, "norm": norm, "tie_embeddings": tie}
    for positions, norm, tie in itertools.product(POSITIONS, ["pre", "post"], ["none", "decoder", "all"])
]


def build(dtype: torch.dtype = torch.float64, **changes: object) -> Transformer:
    """A small model in eval mode with random weights, biases and norms."""
    sizes = {"d_model": 16, "heads": 2, "ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 2}
    words = {"source_vocab_size": 30, "target_vocab_size": 30, "max_positions": 40}
    torch.manual_seed(7)
    model = Transformer(ModelConfig(**{**sizes, **words, **changes})).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # so that no bias or norm stays at 0 or 1
    return model


def ids(*shape: int, vocab: int = 30) -> Tensor:
    """Random token ids, none of them special."""
    return torch.randint(4, vocab, shape)


def keep(*lengths: int) -> Tensor:
    """The mask (B, S) of sentences of these lengths."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def hidden_states(model: Transformer, source: Tensor, source_keep: Tensor, target: Tensor) -> Tensor:
    """Hidden states (N, T, E) of all positions of padded sequences, without a cache."""
    return model.decode(target, model.encode(source, source_keep), source_keep)


def logits(
    model: Transformer | DecodingTransformer, source: Tensor, source_keep: Tensor, target: Tensor
) -> Tensor:
    """Logits (B, T, V) of all positions, without a cache."""
    with torch.no_grad():
        return model.project(model.decode(target, model.encode(source, source_keep), source_keep))


@torch.no_grad()
def decode_cached(
    model: Transformer | DecodingTransformer, source: Tensor, source_keep: Tensor, target: Tensor, beams: int
) -> Tensor:
    """Logits of target (B * beams, T), one position at a time."""
    model = DecodingTransformer(model) if isinstance(model, Transformer) else model
    cache = model.start_cache(model.encode(source, source_keep), source_keep, beams, target.size(1))
    return torch.stack([model.project(model.decode_next(last, cache)) for last in target.unbind(1)], dim=1)
