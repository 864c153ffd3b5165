"""`torch.compile` compiles a model once for all batches; the meta device needs no GPU and no C++ compiler."""

import random

import pytest
import torch
from torch import nn

from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.presets import PRESETS
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.packed_batch import PackedBatch
from mtrain.distributed.ranks import Ranks
from mtrain.kernels.sequences import Padded
from mtrain.model.transformer import Transformer
from mtrain.training.fit import fit
from mtrain.training.step.learner import Learner

SIZES = PRESETS["base"] | {"encoder_layers": 1, "decoder_layers": 1}  # all layers are equal
VOCABULARY = {"source_vocab_size": 32000, "target_vocab_size": 32000, "max_positions": 64}


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are compiled, by a backend that only records them."""
    compiled, real = [], nn.Module.compile

    def record(graph, _):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(
        nn.Module, "compile", lambda module, **options: real(module, backend=record, **options)
    )
    yield compiled
    torch._logging.set_logs()  # type: ignore[attr-defined]
    torch.compiler.reset()


@pytest.mark.slow
def test_batches_of_all_sizes_share_one_compilation(graphs):
    # Made on the CPU: on the meta device, the table of positions would be empty, and grow.
    model = Transformer(ModelConfig(**SIZES, **VOCABULARY)).to("meta").train()
    learner = Learner(model, TrainingConfig(max_steps=1, compile="on", precision="fp32"))
    sizes = random.Random(1)
    batches = [(sizes.randint(3, 9), sizes.randint(5, 60), sizes.randint(5, 60)) for _ in range(8)]
    for sentences, source_length, target_length in [(5, 20, 20), *batches]:  # equal lengths mean nothing
        source = torch.zeros(sentences, source_length, dtype=torch.int64, device="meta")
        target = torch.zeros(sentences, target_length, dtype=torch.int64, device="meta")
        sources, targets = Padded.of(source, source == 0), Padded.of(target)
        learner.model(source.flatten(), sources, target.flatten(), targets).sum().backward()
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_model_of_packed_batches_is_one_graph():
    sizes = {"d_model": 8, "heads": 2, "ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    model = Transformer(ModelConfig(**sizes, **VOCABULARY)).eval()
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    for pairs, length in ((3, 7), (4, 9)):
        inputs = PackedBatch.of_size(pairs, length).inputs()
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    torch.compiler.reset()


@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_rank_that_may_compile_is_not_taken_for_lost(make_config, monkeypatch, setting):
    calls = []
    monkeypatch.setattr(Ranks, "expect_steps", lambda _: calls.append("a rank is lost if it takes 100 s"))
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)
    fit(make_config(training={"compile": setting, "max_steps": 2}), device="cpu")
    assert bool(calls) == (setting == "off")
