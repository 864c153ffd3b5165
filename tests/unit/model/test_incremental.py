"""Calls of modules with less overhead."""

import copy

import torch
from torch import nn

from mtrain.config.sections.model import ModelConfig
from mtrain.kernels.sequences import Padded
from mtrain.model.incremental import DecodingTransformer, reduce_call_overhead
from mtrain.model.transformer import Dropout, EncoderLayer, Transformer
from tests.support.undocumented import documented_only


def test_reduced_call_overhead_changes_neither_results_nor_the_original() -> None:
    sizes = {"d_model": 12, "heads": 3, "ffn_dim": 20, "max_positions": 32}
    layer = EncoderLayer(ModelConfig(**sizes, source_vocab_size=9, target_vocab_size=9)).double().eval()
    fast = copy.deepcopy(layer)
    reduce_call_overhead(fast)
    calls: list[str] = []
    for name, module in [("layer", layer), ("fast", fast)]:
        module.feed_forward.register_forward_hook(lambda *_, name=name: calls.append(name))
    x, sources = torch.randn(10, 12).double(), Padded(2, 5, torch.ones(2, 5, dtype=torch.bool))
    assert torch.equal(fast(x, sources), layer(x, sources))
    assert calls == ["layer"]
    assert list(fast.state_dict()) == list(layer.state_dict()) and isinstance(fast, EncoderLayer)


def test_a_model_for_decoding_shares_the_parameters_and_leaves_the_original_as_it_is() -> None:
    sizes = {"d_model": 12, "heads": 3, "ffn_dim": 20, "encoder_layers": 1, "decoder_layers": 1}
    model = Transformer(ModelConfig(**sizes, max_positions=32, source_vocab_size=9, target_vocab_size=9))
    Dropout.seed(model, 1)
    before = [(name, module, type(module), module.training) for name, module in model.named_modules()]
    packed = DecodingTransformer(model, torch.bfloat16).packed
    assert [(name, module, type(module), module.training) for name, module in model.named_modules()] == before
    assert not {*model.modules()} & {*packed.modules()} and not packed.training
    for ours, theirs in zip(packed.parameters(), model.parameters(), strict=True):
        assert ours is theirs
    for ours, theirs in zip(packed.buffers(), model.buffers(), strict=True):
        assert ours is theirs
    generators = [each.generator for each in model.modules() if isinstance(each, Dropout)]
    assert {each.generator for each in packed.modules() if isinstance(each, Dropout)} <= {*generators}


def test_without_undocumented_means_modules_are_left_as_they_are() -> None:
    layer = nn.Linear(3, 2)
    with documented_only():
        reduce_call_overhead(layer)
    assert type(layer) is nn.Linear and "weight" not in vars(layer)
