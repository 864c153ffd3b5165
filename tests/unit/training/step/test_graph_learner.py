"""Steps as CUDA graphs equal steps without. On a CPU, no graph is captured; everything else is done."""

import gc
import logging
import math
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.checkpoint.checkpoint import Checkpoint, collect_tensors, load_checkpoint
from mtrain.checkpoint.state import TrainState
from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.packed_batch import PackedBatch, pack
from mtrain.device import random_states
from mtrain.distributed.ranks import Ranks
from mtrain.graph_capture import CaptureError, GraphPool, Work
from mtrain.model.build import build_model
from mtrain.model.transformer import Dropout, Transformer
from mtrain.tokenizer.rows import Rows
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.graph_learner import GraphLearner
from mtrain.training.step.learner import Learner
from mtrain.training.step.learning_rate import encoder_share
from mtrain.training.step.optimizer import LossScaler, freeze
from tests.support.ranks import exit_codes, joined, read_logs, run_ranks
from tests.support.training import weights

CPU = torch.device("cpu")
VOCABULARY = 40
RATE = 2.0**-10  # exact in float32
# Source and target lengths of the pairs of each micro-batch of each step.
STEPS = [
    [[(3, 5), (7, 2), (4, 4)]],
    [[(9, 9)], [(2, 3), (20, 30)]],
    [[(5, 5), (6, 6)]],  # needs no other graph than the first step
    [[(40, 33)], [(8, 1)], [(1, 2)]],
    [[(3, 3), (30, 20), (12, 9)]],
]


def hash_dropout(learner: Learner) -> Learner:
    """Let a learner hash its dropout masks, as on a CUDA device."""
    learner.dropout_key = torch.zeros(1, dtype=torch.int32)
    Dropout.use_key(learner.model, learner.dropout_key)
    return learner


def eager(model: Transformer, training: TrainingConfig) -> Learner:
    """A learner without graphs."""
    return hash_dropout(Learner(model, training))


def graphs(model: Transformer, training: TrainingConfig) -> GraphLearner:
    """A learner with graphs."""
    learner = GraphLearner(model, training, Ranks(CPU))
    hash_dropout(learner)
    return learner


def make_model(**changes: object) -> Transformer:
    """A small model in fp64."""
    sizes = {"source_vocab_size": VOCABULARY, "target_vocab_size": VOCABULARY, "max_positions": 200}
    sizes |= {"d_model": 8, "ffn_dim": 12, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    torch.manual_seed(1)
    return Transformer(ModelConfig(**{"dropout": 0.0, **sizes, **changes})).double().train()


def make_recipe(**changes: object) -> TrainingConfig:
    """A recipe without clipping."""
    return TrainingConfig(**{"max_steps": 1, "precision": "fp32", "clip_norm": 0.0, **changes})


def batch_of(pairs: list[tuple[int, int]]) -> PackedBatch:
    """A batch of pairs of these lengths, whose ids depend on the lengths."""
    if not pairs:
        return PackedBatch.without_pairs()
    sides = []
    for lengths in np.array(pairs, np.int32).T:
        ids = np.concatenate([np.arange(n) * 7 + n for n in lengths]) % VOCABULARY
        sides.append(Rows(ids.astype(np.int32), lengths))
    source, target = sides
    return pack(source, target, 2, list(range(len(pairs))))


def take(learner: Learner, number: int, average: WeightAverage | None = None) -> torch.Tensor:
    """The metrics of a step."""
    learner.number = number  # type: ignore[attr-defined]
    batches = [batch_of(pairs) for pairs in STEPS[number]]
    tokens = sum(batch.target_tokens for batch in batches)
    learner.encoder_share = encoder_share(number + 1, learner.training)
    values = learner.step(batches, tokens, RATE * (number + 1)).values
    if average is not None:
        average.update(number + 1)
    return values


def take_all(make: Callable[..., Learner], recipe=None, prepare=lambda learner: None, **model):
    """The metrics of all steps, and what training changes."""
    trained, recipe = make_model(**model), make_recipe(**(recipe or {}))
    freeze(trained, recipe.freeze)
    learner, average = make(trained, recipe), WeightAverage(trained, recipe)
    prepare(learner)
    torch.manual_seed(5)
    values = [take(learner, number, average) for number in range(len(STEPS))]
    state = {**weights(trained), **{f"average.{name}": w for name, w in average.weights.items()}}
    return values, state, learner.loss_scaler.state(), torch.rand(1)


same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9, check_dtype=False)


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        (
            {"clip_norm": 0.5, "ema_decay": 0.9},
            {"dropout": 0.3, "attention_dropout": 0.2, "word_dropout": 0.2},
        ),
        ({"freeze": ["encoder", "embeddings"], "weight_decay": 0.1}, {"dropout": 0.3}),
        ({"r_drop": 5.0}, {"positions": "learned", "tie_embeddings": "none", "norm": "post"}),
        ({}, {"positions": "rotary", "activation": "swiglu"}),
        ({}, {"alignment_head": True, "dropout": 0.3}),
        ({"encoder_after": 2, "clip_norm": 0.5}, {"dropout": 0.3}),
        ({"optimizer": "muon", "weight_decay": 0.1, "encoder_after": 2}, {"dropout": 0.3}),
    ],
)
def test_steps_equal_steps_without_graphs(recipe, model):
    same(take_all(graphs, recipe, **model), take_all(eager, recipe, **model))


def test_pair_classifiers_are_trained():
    def values_of(make: Callable[..., Learner]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        sizes = {"d_model": 8, "ffn_dim": 12, "heads": 2, "encoder_layers": 1, "max_positions": 20}
        words = {"source_vocab_size": VOCABULARY, "target_vocab_size": VOCABULARY}
        config = ModelConfig(head="pair_classifier", dropout=0.2, **sizes, **words)
        learner = make(build_model(config).double().train(), make_recipe())
        pairs = Rows.from_lists([[5, 6, 3, 7, 3], [9, 3, 8, 7, 6, 3]]), Rows.from_lists([[1], [0]])
        return [learner.step([pack(*pairs, 2, [0, 1])], 2, RATE).values for _ in range(3)]

    same(values_of(graphs), values_of(eager))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_that_are_not_finite_are_skipped_and_reduce_the_scale_of_the_loss(optimizer):
    def poison_second_step(learner: Learner) -> None:
        learner.loss_scaler = LossScaler(CPU, enabled=True)

        def hook(module, inputs, hidden):
            is_poisoned = learner.number == 1  # type: ignore[attr-defined]
            return hidden * (math.nan if is_poisoned else 1.0)

        learner.model.decoder_norm.register_forward_hook(hook)

    found, expected = (
        take_all(make, {"optimizer": optimizer}, prepare=poison_second_step) for make in (graphs, eager)
    )
    same(found, expected, equal_nan=True)
    assert [int(values[3]) for values in found[0]] == [0, 1, 0, 0, 0] and found[2] == [32768, 3]


def test_r_drop_may_begin_at_a_later_step():
    def take_two(make: Callable[..., Learner]) -> list[torch.Tensor]:
        learner = make(make_model(dropout=0.2, activation_dropout=0.0), make_recipe(r_drop=5.0))
        learner.r_drop = 0.0
        values = [take(learner, 0)]
        learner.r_drop = 5.0
        return [*values, take(learner, 0)]

    found, expected = take_two(graphs), take_two(eager)
    same(found[0], expected[0])
    assert float(found[1][0]) > 1.01 * float(found[1][1])  # other masks than in the exact layout


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("first", "second"), [(eager, graphs), (graphs, eager)])
def test_a_run_continues_with_or_without_graphs(first, second, optimizer, tmp_path):
    recipe = make_recipe(optimizer=optimizer)
    expected = take_all(eager, {"optimizer": optimizer})[1]
    before = first(make_model(), recipe)
    for number in range(3):
        take(before, number)
    for file, tensors in collect_tensors(before.model, before.optimizer, {}).items():
        save_file(tensors, tmp_path / file)
    rng = {kind: state.numpy().tobytes().hex() for kind, state in random_states(CPU).items()}
    after = second(make_model(), recipe)
    load_checkpoint(Checkpoint(tmp_path, TrainState(rng=rng)), after.model, after.optimizer)
    for number in range(3, len(STEPS)):
        take(after, number)
    same(weights(after.model), expected)
    assert after.updates == 2


def test_a_dry_run_and_graphs_that_are_captured_change_nothing():
    learner = graphs(make_model(dropout=0.2), make_recipe())
    before, random = weights(learner.model), torch.get_rng_state()
    learner.dry_run(batch_of([(9, 9)] * 5))
    take(learner, 0)
    moved = weights(learner.model)
    assert any(not torch.equal(before[name], moved[name]) for name in before)
    other = graphs(make_model(dropout=0.2), make_recipe())
    torch.set_rng_state(random)
    take(other, 0)
    same(moved, weights(other.model))


def test_shapes_are_kept_while_batches_fit(monkeypatch):
    learner = graphs(make_model(), make_recipe())
    learner.expect([batch_of(pairs).layout for step in STEPS for pairs in step])
    captured = []
    for number in [0, 2, 4, 0, 1, 3]:
        take(learner, number)
        captured.append(learner.captures)
    # Whole steps with sentences of up to 32 tokens; their gradients alone, and the update; up to 64 tokens.
    assert captured == [1, 1, 1, 1, 3, 4]
    learner.step([batch_of([(150, 40)] * 3)], 120, RATE)
    assert learner.captures == 5 and learner.layout_for(batch_of([(150, 40)] * 3).layout)


def test_a_table_that_a_graph_reads_is_kept_when_the_model_gets_a_longer_one():
    learner = graphs(make_model(max_positions=3000), make_recipe())
    take(learner, 0)
    table = weakref.ref(next(learner.model.buffers()))
    learner.model.embed.positions(0, 2000, None)  # as a validation with long sentences does
    gc.collect()
    assert table() is not None and len(next(learner.model.buffers())) >= 2000


def fail_above(limit: int, learner: Learner) -> list[int]:
    """Let memory run out in batches with more tokens. Returns a list of the tokens of all later batches,
    surplus included."""
    loss, sizes = learner.loss_on_device, []

    def limited(model, batch):
        if batch.positions > limit:
            raise MemoryError
        sizes.append(batch.positions)
        return loss(model, batch)

    learner.loss_on_device = limited
    return sizes


def loaded(learner: Learner, pairs: list[tuple[int, int]]) -> PackedBatch:
    """A batch as the loader packs it."""
    exact = batch_of(pairs)
    layout = learner.layout_for(exact.layout)
    return exact if layout is None else exact.in_layout(layout)


@pytest.mark.parametrize("captures", [True, False])
def test_micro_batches_become_smaller_when_memory_runs_out(caplog, monkeypatch, captures):
    if not captures:
        monkeypatch.setattr(GraphPool, "capture", cannot_capture)
    learner, plain = graphs(make_model(), make_recipe()), eager(make_model(), make_recipe())
    fail_above(300, learner)
    for pairs in ([(30, 20)] * 6, [(20, 30)] * 4, [(1, 2)]):
        found, expected = (each.step([loaded(each, pairs)], 120, RATE).values for each in (learner, plain))
        same(found, expected)
    same(weights(learner.model), weights(plain.model))
    assert learner.max_micro_batch_positions == (192 + 128) / 2
    assert sum("out of memory" in message for message in caplog.messages) == 1
    fail_above(0, learner)
    with pytest.raises(MemoryError):
        learner.step([batch_of([(60, 60)])], 60, RATE)


def test_the_shapes_of_smaller_micro_batches_keep_the_limit_and_do_not_change():
    learner = graphs(make_model(), make_recipe())
    learner.expect([batch_of([(30, 20)] * 32).layout, batch_of([(20, 25)] * 35).layout])
    assert learner.shapes.tokens == 960 + 896
    sizes = fail_above(1000, learner)

    def step(pairs: list[tuple[int, int]]) -> list[int]:
        """The sizes of the micro-batches of a step. The first step of a kind also captures graphs."""
        sizes.clear()
        learner.step([loaded(learner, pairs)], 100, RATE)
        return sizes

    step([(30, 20)] * 32)
    shapes, limit = learner.shapes, learner.max_micro_batch_positions
    assert (shapes.tokens, limit) == (896, 928)
    for pairs in ([(30, 20)] * 14, [(20, 25)] * 16, [(30, 20)] * 12):
        step(pairs)
        assert step(pairs) == [shapes.tokens]
    for pairs in ([(30, 20)] * 28, [(20, 25)] * 34, [(25, 25)] * 31):
        assert step(pairs) == [shapes.tokens] * 2
    assert learner.shapes == shapes


@pytest.mark.parametrize("pairs", [[(3, 4)], []])
def test_a_small_batch_in_a_large_layout_does_not_end_training_when_memory_runs_out(pairs):
    learner = graphs(make_model(), make_recipe())
    learner.expect([batch_of([(30, 20)] * 32).layout])
    sizes = fail_above(500, learner)
    learner.step([loaded(learner, pairs)], 4, RATE)
    assert sizes and learner.shapes.tokens <= learner.max_micro_batch_positions == 384


@pytest.mark.parametrize("pairs", [[(60, 60)], [(60, 60), (5, 5), (7, 3)], [(1, 2)] * 3])
def test_memory_that_suffices_for_no_smaller_batch_is_an_error(pairs):
    learner = graphs(make_model(), make_recipe())
    learner.expect([batch_of([(30, 20)] * 32).layout])
    fail_above(60, learner)
    with pytest.raises(MemoryError):
        learner.step([batch_of(pairs)], 60, RATE)


def cannot_capture(pool: GraphPool, work: Work) -> Work:
    """Replaces `GraphPool.capture`."""
    raise CaptureError("not on this GPU")


def test_training_continues_without_graphs_if_they_cannot_be_captured(monkeypatch, caplog):
    monkeypatch.setattr(GraphPool, "capture", cannot_capture)
    with caplog.at_level(logging.WARNING):
        found = take_all(graphs)
    assert caplog.messages == ["training continues without CUDA graphs: not on this GPU"]
    same(found, take_all(eager))


def is_whole_step(graph) -> bool:
    return graph.layout is not None and graph.with_update


def is_gradient(graph) -> bool:
    return not graph.with_update


def is_update(graph) -> bool:
    return graph.layout is None


def do_nothing(work: Work) -> Work:
    return lambda: None


def without_optimizer(work: Work) -> Work:
    """The same work, in which the optimizer does nothing."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", lambda optimizer: None)
            work()

    return run


@pytest.mark.parametrize(
    ("is_wrong", "wrong", "model"),
    [
        (is_whole_step, do_nothing, {}),
        (is_whole_step, do_nothing, {"dropout": 0.1, "attention_dropout": 0.1}),
        (is_whole_step, without_optimizer, {}),
        (is_gradient, do_nothing, {}),
        (is_gradient, do_nothing, {"attention_dropout": 0.1}),
        (is_update, do_nothing, {}),
        (is_update, without_optimizer, {}),
    ],
)
def test_a_graph_that_computes_something_else_is_not_used(monkeypatch, caplog, is_wrong, wrong, model):
    monkeypatch.setattr(
        GraphPool, "capture", lambda pool, work: wrong(work) if is_wrong(work.args[0]) else work
    )
    with caplog.at_level(logging.WARNING):
        found = take_all(graphs, {"clip_norm": 0.5}, **model)
    assert len(caplog.messages) == 1 and "a graph computes another loss, nll, gradient or" in caplog.text
    same(found, take_all(eager, {"clip_norm": 0.5}, **model))


def test_a_graph_that_draws_random_numbers_is_compared_with_work_that_draws_the_same():
    learner = graphs(make_model(), make_recipe())
    learner.model.decoder_norm.register_forward_hook(lambda module, inputs, hidden: hidden * torch.rand(()))
    take(learner, 0)
    take(learner, 1)
    assert learner.uses_graphs and learner.captures == 3


@pytest.mark.parametrize("fault", [None, "memory", "capture"])
def test_two_ranks_take_the_steps_of_one(tmp_path, fault):
    # The micro-batches of each rank in two steps
    shares: list = [[[[(9, 9), (2, 3)]], [[(20, 30)] * 8, [(3, 3)]]], [[[]], [[(5, 6)]]]]

    def steps_of(learner: Learner, ranks: list[int]) -> dict[str, torch.Tensor]:
        values = {}
        for number, step in enumerate(shares):
            own = [batch_of(pairs) for rank in ranks for pairs in step[rank]]
            tokens = sum(batch_of(pairs).target_tokens for part in step for pairs in part)
            values[f"values.{number}"] = learner.step(own, tokens, RATE).values
        return {**values, **weights(learner.model)}

    def work(ranks: Ranks) -> None:
        model = make_model()
        if ranks.rank:  # the weights come from rank 0
            torch.nn.init.zeros_(model.source_embedding.weight)
        learner = GraphLearner(model, make_recipe(), ranks)
        if ranks.rank and fault == "memory":
            fail_above(300, learner)
        elif ranks.rank and fault == "capture":
            GraphPool.capture = cannot_capture  # in this process
        save_file(steps_of(learner, [ranks.rank]), tmp_path / f"{ranks.rank}")

    assert exit_codes(run_ranks(2, joined(work), tmp_path)) == [0, 0], read_logs(tmp_path)
    expected = steps_of(eager(make_model(), make_recipe()), [0, 1])
    for rank in range(2):
        same(load_file(tmp_path / f"{rank}"), expected)
    log = read_logs(tmp_path)[1]
    assert ("out of memory" in log) == (fault == "memory")
    assert ("without CUDA graphs" in log) == (fault == "capture")
