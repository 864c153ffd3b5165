"""Conversion of tensors between Transformer and models of Hugging Face Transformers with the same layers, in
both directions with one table of names: MarianMTModel (post-norm), M2M100ForConditionalGeneration (pre-norm),
and PegasusForConditionalGeneration (pre-norm), which also stores positions as weights."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.checkpoint.tensors import model_without_weights
from mtrain.config.sections.model import ModelConfig, Positions
from mtrain.errors import ModelError
from mtrain.model.transformer import Transformer, sinusoidal_positions

_ATTENTION = {"query_key_value": ("q_proj", "k_proj", "v_proj"), "output": ("out_proj",)}
_POSITIONS = {
    "learned_positions.weight": "model.encoder.embed_positions.weight",
    "learned_target_positions.weight": "model.decoder.embed_positions.weight",
}
BIAS = "final_logits_bias"  # (1, V); mtrain's is (V)
SHARED = "model.shared.weight"
ENCODER = "model.encoder.embed_tokens.weight"
DECODER = "model.decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
NEVER = -1e4  # the logit of a token that is never generated; fp16 can represent it
EMBEDDINGS = (SHARED, ENCODER, DECODER, OUTPUT)  # a file has all of them, or only the untied ones


def _layer(decoder: bool) -> dict[str, tuple[str, ...]]:
    """The modules of a layer, each with the modules of Transformers whose rows it concatenates."""
    attentions = {"self_attention": "self_attn"} | ({"cross_attention": "encoder_attn"} if decoder else {})
    modules: dict[str, tuple[str, ...]] = {"feed_forward.inner": ("fc1",), "feed_forward.outer": ("fc2",)}
    modules["feed_forward_residual.norm"] = ("final_layer_norm",)
    for ours, theirs in attentions.items():
        modules[f"{ours}_residual.norm"] = (f"{theirs}_layer_norm",)
        for module, parts in _ATTENTION.items():
            modules[f"{ours}.{module}"] = tuple(f"{theirs}.{part}" for part in parts)
    return modules


def names_in_transformers(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The tensor names of a Transformer, each with the names of the Transformers tensors whose rows it
    concatenates."""
    shared = config.tie_embeddings == "all"
    names: dict[str, tuple[str, ...]] = {"source_embedding.weight": (SHARED if shared else ENCODER,)}
    if not shared:
        names["target_embedding.weight"] = (DECODER,)
    if config.tie_embeddings == "none":
        names["output_weight"] = (OUTPUT,)
    if config.output_bias:
        names["output_bias"] = (BIAS,)
    if config.positions == "learned":
        names |= {ours: (theirs,) for ours, theirs in _POSITIONS.items()}
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for ours, theirs in _layer(side == "decoder").items():
            for i in range(layers):
                for part in ("weight", "bias"):
                    names[f"{side}.{i}.{ours}.{part}"] = tuple(
                        f"model.{side}.layers.{i}.{module}.{part}" for module in theirs
                    )
        if config.norm == "pre":
            for part in ("weight", "bias"):
                names[f"{side}_norm.{part}"] = (f"model.{side}.layer_norm.{part}",)
    return names


def to_marian(config: ModelConfig, tensors: dict[str, Tensor], add_pad: bool) -> dict[str, Tensor]:
    """Convert the tensors of a Transformer to tensors of a MarianMTModel.

    With `add_pad`, the vocabulary gets one more token at its end, which starts translations and is never
    generated. Programs that load Marian models start the decoder with an embedding of zeros.
    """
    tensors = with_zero_start(config, tensors) if add_pad or config.bos_id == config.pad_id else tensors
    theirs = renamed(config, tensors)
    return with_more_tokens(theirs, 1, 1) if add_pad else theirs


def with_more_tokens(theirs: dict[str, Tensor], source: int, target: int) -> dict[str, Tensor]:
    """The tensors of a MarianMTModel with numbers of tokens added at the ends of its vocabularies, which have
    embeddings of zeros and are never generated."""
    table = next(theirs[name] for name in (OUTPUT, DECODER, SHARED) if name in theirs)
    counts = dict.fromkeys(EMBEDDINGS, target) | {ENCODER: source}
    padded = {name: F.pad(theirs[name], (0, 0, 0, counts[name])) for name in EMBEDDINGS if name in theirs}
    bias = theirs.get(BIAS, table.new_zeros(1, len(table)))
    return theirs | padded | {BIAS: F.pad(bias, (0, target), value=NEVER)}


def to_pegasus(model: Transformer, positions: int) -> dict[str, Tensor]:
    """Convert the tensors of a Transformer to tensors of a PegasusForConditionalGeneration with a number of
    positions, which is `max_positions` if they are learned."""
    theirs = renamed(model.config, model.state_dict())
    for name in _POSITIONS.values():
        if name not in theirs:
            table = model.embed.positions(0, positions, learned=None)
            assert table is not None  # positions are not rotary
            theirs[name] = table.clone()
    return theirs


def renamed(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a Transformer under their names in Transformers."""
    theirs = {}
    for ours, names in names_in_transformers(config).items():
        for name, part in zip(names, tensors[ours].chunk(len(names)), strict=True):
            theirs[name] = part[None] if name == BIAS else part.contiguous()
    return theirs


def with_zero_start(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an equivalent Transformer in which the embedding of the start token is zero.

    The embedding of the start token is subtracted from its whole table, and the first layer adds it back:
    to the input of self-attention by the biases of queries, keys and values, and to the residual connection
    by the bias of the output. If output weights are tied, all logits of a position shift by the same number.
    """
    shared = config.tie_embeddings == "all"
    table = f"{'source' if shared else 'target'}_embedding.weight"
    start = tensors[table][config.bos_id].double()  # (E)
    shifted = {table: tensors[table] - start}
    added = start * config.d_model**0.5  # the scale of embeddings
    for side in ("encoder", "decoder") if shared else ("decoder",):
        attention = f"{side}.0.self_attention"
        inner = tensors[f"{attention}.query_key_value.weight"].double() @ added  # (3E)
        for part, change in {"query_key_value": inner, "output": added}.items():
            name = f"{attention}.{part}.bias"
            shifted[name] = tensors[name] + change
    return tensors | {name: tensor.to(tensors[name].dtype) for name, tensor in shifted.items()}


def starts_like(theirs: dict[str, Tensor], start: int, token: int) -> bool:
    """Whether two tokens have the same embedding in the decoder of a model of Transformers."""
    table = next((theirs[name] for name in (DECODER, SHARED, ENCODER, OUTPUT) if name in theirs), None)
    rows = 0 if table is None or table.dim() != 2 else len(table)
    return start < rows and token < rows and table is not None and torch.equal(table[start], table[token])


def without_last_token(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a MarianMTModel without the token that `to_marian` has added."""
    parts = {name: tensor[:-1] for name, tensor in theirs.items() if name in EMBEDDINGS and tensor.dim()}
    biases = {name: tensor[..., :-1] for name, tensor in theirs.items() if name == BIAS and tensor.dim()}
    return theirs | parts | biases


def from_transformers(
    theirs: dict[str, Tensor], config: dict[str, Any], model: ModelConfig, file: Path
) -> tuple[dict[str, Tensor], ModelConfig]:
    """The tensors of a Transformer, in fp32, from the tensors of a model of Transformers with a `config`.

    Also returns the model config, without an output bias if that is zero or missing. Raises ModelError, which
    names the tensor, if one is missing, unexpected, not finite or of another shape.
    """
    theirs = dict(theirs)
    if model.positions != "learned":
        for name in _POSITIONS.values():
            theirs.pop(name.replace("embed_positions.weight", "version"), None)  # of old files of fairseq
            # M2M-100's table, in old files, begins with the position 0.
            if (table := theirs.pop(f"{name}s", None)) is not None:
                theirs[name] = table[model.first_position :] if table.dim() else table
            if (table := theirs.pop(name, None)) is not None and not _are_sinusoidal(table, model):
                raise ModelError(f"{file}: {name}: unsupported: positional encodings that are not sinusoidal")
    _tie(theirs, config, file)
    if BIAS not in theirs or not theirs[BIAS].any():
        theirs.pop(BIAS, None)
        model = model.model_copy(update={"output_bias": False})
    own = model_without_weights(model).state_dict()
    ours: dict[str, Tensor] = {}
    wanted = names_in_transformers(model)
    known = {name for names in wanted.values() for name in names} | set(EMBEDDINGS)
    if extra := sorted(theirs.keys() - known):
        raise ModelError(f"{file}: unexpected tensors: {', '.join(extra[:5])}")
    for ours_name, names in wanted.items():
        for name in names:
            rows, *rest = own[ours_name].shape
            shape = [1, rows] if name == BIAS else [rows // len(names), *rest]
            if name not in theirs:
                raise ModelError(f"{file}: missing tensor {name}")
            if (found := list(theirs[name].shape)) != shape:
                raise ModelError(f"{file}: {name} has the shape {found}; the settings require {shape}")
            if not torch.stack(theirs[name].aminmax()).isfinite().all():  # without a mask in memory
                raise ModelError(f"{file}: {name} contains NaN or infinity")
        joined = torch.cat([theirs[name] for name in names]) if len(names) > 1 else theirs[names[0]]
        if names[0] in (DECODER, OUTPUT):  # may be the same tensor as ENCODER, which cannot be stored twice
            joined = joined.clone()
        ours[ours_name] = joined.float().reshape(own[ours_name].shape)
    return ours, model


def _tie(theirs: dict[str, Tensor], config: dict[str, Any], file: Path) -> None:
    """Add the tensors of tied embeddings, which may be stored under only one of their names."""
    groups = [[ENCODER], [DECODER]]
    if config["share_encoder_decoder_embeddings"]:
        groups = [[SHARED, ENCODER, DECODER]]
    elif SHARED in theirs and not config["tie_word_embeddings"]:  # in Transformers 4, not in 5
        theirs.update({name: theirs[SHARED] for name in (ENCODER, DECODER) if name not in theirs})
    if config["tie_word_embeddings"]:
        groups[-1].append(OUTPUT)
    for group in groups:
        found = [name for name in group if name in theirs]
        for name in found[1:]:
            if not torch.equal(theirs[name], theirs[found[0]]):
                raise ModelError(f"{file}: {found[0]} and {name} differ, but config.json ties them")
        theirs.update({name: theirs[found[0]] for name in group if found})


def positions_in(theirs: dict[str, Tensor], model: ModelConfig) -> Positions:
    """Which positions the tables in the weights of a PegasusForConditionalGeneration contain."""
    tables = [theirs[name] for name in _POSITIONS.values() if name in theirs]
    for kind in ("sinusoidal", "sinusoidal_interleaved", "sinusoidal_marian"):
        if all(_are_sinusoidal(table, model.model_copy(update={"positions": kind})) for table in tables):
            return kind
    return "learned"


def _are_sinusoidal(table: Tensor, model: ModelConfig) -> bool:
    """Whether a table of positions contains the sinusoidal ones of a model."""
    if table.dim() != 2 or not len(table) or table.size(1) != model.d_model:
        return False
    expected = sinusoidal_positions(len(table), model.d_model, model.positions, model.first_position)
    # bf16 rounds them by up to 2 ** -9.
    return bool((table.float() - expected).abs().max() <= 2**-8)
