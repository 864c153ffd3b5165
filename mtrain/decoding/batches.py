"""Batches of sentences of similar length, as padded matrices."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.data.epochs.batching import MAX_ROWS, cut_by_budget
from mtrain.model.incremental import DecodingTransformer, Models
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.rows import Rows, pad

SHORT = 16  # tokens that a shorter line counts as, because the logits of each row need memory
# Tokens of a batch on a CUDA device with enough memory, for wide and narrow models. Narrow ones need more,
# because below some number of rows, a step takes as long as its kernels need to start (estimated).
_CUDA_TOKENS = 65536
_CUDA_TOKENS_IF_NARROW = 131072
_NARROW = 512  # narrower models are narrow
_MEMORY_SHARE = 0.5  # of the free memory


def batch_tokens(config: DecodingConfig, models: Models, device: torch.device) -> int:
    """`decoding.batch_tokens` in numbers. On a CUDA device, `auto` is 65,536, or 131,072 for models
    narrower than 512, halved (but not below the value of a CPU) until a batch fits in half of the free
    memory."""
    if config.batch_tokens != "auto" or device.type != "cuda":
        return config.moderate_batch_tokens
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    is_narrow = all(model.config.d_model < _NARROW for model in models)
    tokens = _CUDA_TOKENS_IF_NARROW if is_narrow else _CUDA_TOKENS
    token_bytes = sum(_bytes_per_token(config, model) for model in models)
    while tokens > config.moderate_batch_tokens and tokens * token_bytes > _MEMORY_SHARE * free:
        tokens //= 2
    return tokens


def _bytes_per_token(config: DecodingConfig, model: DecodingTransformer) -> float:
    """About the memory that a batch needs for each of its tokens, in fp32: logits and two copies of them, at
    most one row for SHORT tokens; keys and values of the source and the longest output; the encoder."""
    sizes = model.config
    logits = 3 * sizes.target_vocab_size / SHORT
    positions = 1 + config.max_length_ratio + config.max_length_offset / SHORT
    cache = 2 * sizes.decoder_layers * sizes.d_model * positions
    return 4 * (logits + cache + 8 * sizes.d_model + sizes.ffn_dim)


def in_batches(lengths: Sequence[int], budget: int, hypotheses: int = 1) -> Iterator[list[int]]:
    """Yield batches of indices of rows of similar length, within a budget of padded tokens, longest first.
    Each row has `hypotheses` hypotheses; a batch has at most MAX_ROWS of them."""
    array = np.array(lengths, dtype=np.int64)
    order = np.argsort(array, kind="stable")
    edges = cut_by_budget(array[order], budget, max(1, MAX_ROWS // hypotheses))
    for start, end in reversed(list(pairwise(edges))):
        yield order[start:end].tolist()


def padded(
    rows: Sequence[Sequence[int]], fill: int, device: torch.device, multiple: int = 1, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of ids as a padded matrix on the device, and a mask that is True at tokens. The width is the
    length of the longest row, rounded up to a multiple of `multiple`, but to no more than `most`."""
    longest = max(map(len, rows))
    width = longest + -longest % multiple
    if most is not None:
        width = min(width, most)
    matrix, keep = pad(Rows.from_lists(rows), fill, width)
    return torch.from_numpy(matrix).to(device), torch.from_numpy(keep).to(device)


def position_limit(models: Sequence[Transformer | DecodingTransformer]) -> int | None:
    """The number of positions for which all models have embeddings; None if no model has learned ones."""
    learned = (model.config.max_positions for model in models if model.config.positions == "learned")
    return min(learned, default=None)
