"""Tensors and options of a Transformer as the program Marian names them, in both directions.

Its tensors are those of a MarianMTModel of Transformers under other names; linear maps are transposed.
"""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from mtrain.config.sections.model import ModelConfig
from mtrain.errors import ModelError
from mtrain.interop.bergamot.weights import Arrays
from mtrain.interop.marian_tensors import BIAS, DECODER, ENCODER, OUTPUT, SHARED, names_in_transformers

_OUTPUT = "decoder_ff_logit_out"
_OUTSIDE = {SHARED: "Wemb", ENCODER: "encoder_Wemb", DECODER: "decoder_Wemb"}  # of layers
_OUTSIDE |= {OUTPUT: f"{_OUTPUT}_Wt", BIAS: f"{_OUTPUT}_b"}
# The modules of a layer, with a place for the part: W or b of a linear map, scale or bias of a norm.
_MODULES = {"fc1": "ffn_{}1", "fc2": "ffn_{}2", "final_layer_norm": "ffn_ffn_ln_{}"}
for _theirs, _attention in {"self_attn": "self", "encoder_attn": "context"}.items():
    _MODULES[f"{_theirs}_layer_norm"] = f"{_attention}_Wo_ln_{{}}"
    for _map in ("q", "k", "v", "out"):
        _MODULES[f"{_theirs}.{_map}_proj"] = f"{_attention}_{{}}{_map[0]}"
_MULTIPLIERS = "_QuantMultA"  # ends the names of constants that some quantized models have
_ACTIVATIONS = {"relu": "relu", "silu": "swish"}  # Marian's gelu is an approximation

# Options that change what a model computes, and the supported values, of which mtrain writes the first one. A
# file may lack any of them.
_OPTIONS: dict[str, list[Any]] = {
    "type": ["transformer"],
    "transformer-preprocess": [""],
    "transformer-postprocess": ["dan", "an"],  # d is dropout
    "transformer-postprocess-emb": ["d", ""],
    "transformer-postprocess-top": [""],
    "transformer-decoder-autoreg": ["self-attention"],
    "transformer-ffn-depth": [2],
    "transformer-no-projection": [False],
    "transformer-pool": [False],
    "transformer-tied-layers": [[]],
    "transformer-train-position-embeddings": [False],
    "transformer-train-positions": [False],
    "lemma-dim-emb": [0],
    "input-types": [[]],
    "ulr": [False],
    "right-left": [False],
    "transformer-decoder-dim-ffn": [0],
    "transformer-decoder-ffn-depth": [0],
}


def native_name(name: str) -> str:
    """Marian's name of a tensor of a MarianMTModel."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, side, _, layer, module = name.split(".", 4)
    module, _, part = module.rpartition(".")
    parts = {"weight": "scale", "bias": "bias"} if module.endswith("norm") else {"weight": "W", "bias": "b"}
    return f"{side}_l{int(layer) + 1}_{_MODULES[module].format(parts[part])}"


def to_native(theirs: dict[str, Tensor]) -> Arrays:
    """The tensors of a MarianMTModel as Marian stores them."""
    native = {}
    for name, tensor in theirs.items():
        if name not in _OUTSIDE:
            tensor = tensor.t() if tensor.dim() == 2 else tensor[None]
        native[native_name(name)] = tensor.float().numpy()
    return native


def from_native(arrays: Arrays, model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a MarianMTModel, from Marian's. Unknown ones keep their names."""
    wanted = [name for names in names_in_transformers(model).values() for name in names]
    known = {native_name(name): name for name in (*_OUTSIDE, *wanted)}
    theirs = {}
    for native, array in arrays.items():
        name, tensor = known.get(native, native), torch.from_numpy(array.copy())
        if native == f"{_OUTPUT}_W":  # in old files, transposed
            name, tensor = OUTPUT, tensor.t()
        elif name not in (native, *_OUTSIDE):
            is_map = not name.endswith("norm.weight") and name.endswith("weight")
            tensor = tensor.t() if is_map and tensor.dim() == 2 else tensor.flatten()
        if not native.endswith(_MULTIPLIERS):
            theirs[name] = tensor.contiguous()
    return theirs


def options_of(model: ModelConfig, alignment_layer: int) -> str:
    """The options of a model, in YAML. Alignments come from a decoder layer, counted from 0."""
    tie = model.tie_embeddings
    return yaml.safe_dump(
        {option: values[0] for option, values in _OPTIONS.items()}
        | {
            "dim-emb": model.d_model,
            "dim-vocabs": [model.source_vocab_size, model.target_vocab_size],
            "enc-depth": model.encoder_layers,
            "dec-depth": model.decoder_layers,
            "transformer-heads": model.heads,
            "transformer-dim-ffn": model.ffn_dim,
            "transformer-ffn-activation": _ACTIVATIONS[model.activation],
            "transformer-guided-alignment-layer": alignment_layer + 1,
            "tied-embeddings": tie == "decoder",
            "tied-embeddings-all": tie == "all",
            "tied-embeddings-src": False,
        }
    )


def architecture_of(options: dict[str, Any], file: Path) -> dict[str, Any]:
    """The keys of a ModelConfig that the options of a model state.

    Raises ModelError, which names the option, if one is missing or unsupported.
    """

    def given(option: str) -> Any:
        if option not in options:
            raise ModelError(f"{file}: the option {option} is missing")
        return options[option]

    for option, values in _OPTIONS.items():
        if (value := options.get(option, values[0])) not in values:
            raise ModelError(f"{file}: unsupported: {option}: {value!r}; must be {values[0]!r}")
    activations = {theirs: ours for ours, theirs in _ACTIVATIONS.items()}
    if (activation := given("transformer-ffn-activation")) not in [*activations]:
        known = " or ".join(activations)
        raise ModelError(f"{file}: unsupported: transformer-ffn-activation: {activation!r}; must be {known}")
    tied, sources = options.get("tied-embeddings"), options.get("tied-embeddings-src")
    shared = options.get("tied-embeddings-all") or (tied and sources)
    return {
        "d_model": given("dim-emb"),
        "heads": given("transformer-heads"),
        "encoder_layers": given("enc-depth"),
        "decoder_layers": given("dec-depth"),
        "ffn_dim": given("transformer-dim-ffn"),
        "activation": activations[activation],
        "norm": "post",
        "positions": "sinusoidal_marian",
        "tie_embeddings": "all" if shared else "decoder" if tied else "none",
        "output_bias": True,
    }
