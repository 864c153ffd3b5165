"""The size of micro-batches, chosen from the memory that they keep for the backward pass."""

import gc
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mtrain.checkpoint.state import TrainState
from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.batching import Batch, Division, plan_batches
from mtrain.data.epochs.loader import largest_batches
from mtrain.data.epochs.schedule import Position
from mtrain.data.epochs.windows import Window
from mtrain.distributed.ranks import Ranks
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.rows import Rows
from mtrain.training.fit import fit, make_trainer
from mtrain.training.setup import micro_batch as memory
from mtrain.training.setup.micro_batch import (
    LIMIT,
    activation_bytes,
    agree_on_micro_batches,
    available_memory,
    choose_micro_batch_tokens,
    read_limit,
    write_limit,
)
from mtrain.training.step.learner import Learner


def make_learner(workers: int = 1, d_model: int = 16, vocab: int = 50, precision: str = "fp32") -> Learner:
    sizes = {"d_model": d_model, "ffn_dim": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    pieces = {"source_vocab_size": vocab, "target_vocab_size": vocab, "max_positions": 64}
    recipe = TrainingConfig(max_steps=1, precision=precision)
    return Learner(Transformer(ModelConfig(**sizes, **pieces)).train(), recipe, workers)


def test_a_micro_batch_is_halved_until_it_fits_and_holds_a_sentence(monkeypatch):
    assert choose_micro_batch_tokens(make_learner(), 64, 4096, memory=10**12) == 4096
    sizes = [
        choose_micro_batch_tokens(make_learner(), 64, 4096, memory=10**power) for power in (5, 6, 7, 8, 9)
    ]
    assert sizes == sorted(sizes) and sizes[0] == 64 and sizes[-1] == 4096 and 64 < sizes[2] < 4096
    assert choose_micro_batch_tokens(make_learner(workers=4), 64, 4096, memory=10**7) < sizes[2]
    assert choose_micro_batch_tokens(make_learner(d_model=64), 64, 4096, memory=10**7) < sizes[2]
    monkeypatch.setattr(memory, "MAX_CPU_TOKENS", 32)  # fewer than the longest sentence has
    assert choose_micro_batch_tokens(make_learner(), 64, 4096, memory=1) == 64


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_memory_per_token_is_separated_from_constant_memory(precision):
    """With a large vocabulary, nearly all memory is its gradient and its copy in bf16, which exist once."""
    learner = make_learner(vocab=20_000, precision=precision)
    batches = [make_batch(rows) for rows in (2, 4, 64)]
    few, more, many = (activation_bytes(learner, batch) for batch in batches)
    assert few + 31 * (more - few) == pytest.approx(many, rel=0.02)
    assert many < 4 * few  # nearly all of it does not depend on the number of tokens
    # Micro-batches get half of the memory: enough for 512 tokens if each is not charged with the vocabulary.
    assert choose_micro_batch_tokens(learner, 8, 512, int(2.1 * many)) == 512
    assert choose_micro_batch_tokens(learner, 8, 512, int(1.9 * many)) == 256


def test_measuring_memory_keeps_none():
    """On a GPU, an autograd graph that stays alive also prevents the capture of CUDA graphs."""
    learner = make_learner()
    activation_bytes(learner, make_batch(2))
    weight = weakref.ref(learner.model.source_embedding.weight)
    del learner
    gc.collect()
    assert weight() is None


def make_batch(rows: int, length: int = 8) -> Batch:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(ids, ids == 0, ids, ids, ids.numel(), [0] * rows)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {}, None),
        ("0::/", {"memory.max": "max"}, None),
        ("0::/", {"memory.max": "1000"}, 1000),
        ("0::/user/job/step", {"user/job/memory.max": "2000", "user/job/step/memory.max": "max"}, 2000),
        ("0::/user/job", {"user/memory.max": "1500", "user/job/memory.max": "3000"}, 1500),
        ("0::/user/job", {"other/memory.max": "10"}, None),
        ("4:memory:/docker/x", {"memory/docker/x/memory.limit_in_bytes": "4000"}, 4000),
        ("4:cpu,memory:/a/b", {"memory/a/memory.limit_in_bytes": "500"}, 500),
        ("4:cpu:/a", {"memory/memory.limit_in_bytes": "700"}, 700),
        ("0::/", {"memory.max": "not a number"}, None),
        (None, {"memory.max": "900"}, 900),
    ],
)
def test_memory_is_that_of_the_machine_or_the_lowest_limit_of_a_cgroup(tmp_path, groups, limits, expected):
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    for name, limit in limits.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    found = available_memory(CPU, tmp_path)
    assert found == expected if expected else 2**28 < found < 2**48


def test_memory_is_at_most_the_limit_of_the_address_space(monkeypatch):
    resource = pytest.importorskip("resource")

    def memory_with(limit: int) -> int:
        limits = {resource.RLIMIT_AS: (limit, resource.RLIM_INFINITY)}
        monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
        return available_memory(CPU)

    assert [memory_with(limit) for limit in (2**26, 2**27)] == [2**26, 2**27]
    assert memory_with(resource.RLIM_INFINITY) > 2**27


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_memory_is_that_of_the_gpu(monkeypatch, kind):
    if kind == "mps":
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 2**33)
    elif kind == "xpu":  # some devices do not tell how much is free
        properties = SimpleNamespace(total_memory=2**33)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: properties)
    else:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**32, 2**36))  # free, and in all
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2**32)  # by this process
    assert available_memory(torch.device(kind)) == 2**33


@pytest.mark.parametrize(
    "changes",
    [{"subword_sampling": 0.1}, pytest.param({"augment": {"uppercase": 0.1}}, marks=pytest.mark.slow)],
)
def test_a_micro_batch_can_hold_the_longest_pair_of_any_epoch(make_config, set_memory, changes):
    set_memory(1)
    keys = {**changes, "max_length": 64}
    recipe = {"batch_tokens": 512, "max_steps": 12}
    fit(make_config(data=keys, training=recipe), device="cpu")
    trainer = make_trainer(make_config("two", data=keys, training=recipe), device="cpu")
    assert trainer.planner.division.micro_batch_tokens == 64


@pytest.mark.parametrize("workers", [1, 2])
def test_the_rehearsal_takes_the_largest_batch_and_leaves_no_trace(
    make_config, workers, monkeypatch, set_threads
):
    set_threads(workers)
    trainer = make_trainer(make_config(model={"dropout": 0.3}), device="cpu")
    window = trainer.planner.open(Position())
    batch = largest_batches(trainer.loader, window)[0]
    planned = [rows for step in window.plan.steps for rows in step if len(rows)]
    sizes = [trainer.loader.batch(rows, window.corpus) for rows in planned]
    positions = [each.source.numel() + each.labels.numel() for each in sizes]
    assert batch.source.numel() + batch.labels.numel() == max(positions)
    squares = [each.labels.size(0) * max(each.source.size(1), each.labels.size(1)) ** 2 for each in sizes]
    last = largest_batches(trainer.loader, window)[-1]
    assert last.labels.size(0) * max(last.source.size(1), last.labels.size(1)) ** 2 == max(squares)
    before = torch.get_rng_state()
    weights = [parameter.clone() for parameter in trainer.model.parameters()]
    moments, real, held = trainer.learner.optimizer.state.values(), trainer.learner.loss, []

    def noting(*arguments):
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        held.append(all(gradient is not None for gradient in gradients) and len(moments) == len(gradients))
        return real(*arguments)

    monkeypatch.setattr(trainer.learner, "loss", noting)
    trainer.learner.dry_run(batch)
    assert held == [True] * workers  # while gradients and moments exist, as in a step
    assert torch.equal(before, torch.get_rng_state())
    assert moments and all(not state["exp_avg"].any() and state["step"] == 0 for state in moments)
    for replica in trainer.learner.replicas:
        assert all(parameter.grad is None for parameter in replica.parameters())
        assert all(torch.equal(*pair) for pair in zip(weights, replica.parameters(), strict=True))


def test_the_largest_micro_batches_are_found_for_very_long_sentences(make_config):
    """2^31 is less than the square of 50,000 tokens."""
    config = make_config(training={"batch_tokens": 60_000, "micro_batch_tokens": 60_000})
    loader = make_trainer(config, device="cpu").loader
    lengths = np.array([300] * 400 + [50_000], dtype=np.int32)

    def fetch(rows):
        side = Rows(np.zeros(lengths[rows].sum(), np.int32), lengths[rows])
        return side, side

    corpus = SimpleNamespace(source_lengths=lengths, target_lengths=lengths, fetch=fetch)
    plan = plan_batches((lengths, lengths), 60_000, Division(60_000), key=(1, 0))
    many, long = (batch.rows for batch in largest_batches(loader, Window(corpus, plan, share=1.0)))
    assert len(many) == 200 and long == [400]
    most, longest = largest_batches(
        loader, Window(corpus, plan, share=0.5)
    )  # there are longer pairs elsewhere
    length = config.data.max_length
    assert most.rows == many and longest.source.shape == (60_000 // length, length)
    for tokens, rows in ((7 * length, 7), (length - 1, 1)):  # then no batch has more tokens
        loader.planner.division = Division(tokens)
        [longest] = largest_batches(loader, Window(corpus, plan, share=0.5))
        assert longest.source.shape == longest.labels.shape == (rows, length)


def test_automatic_micro_batches_depend_on_memory_and_given_sizes_are_kept(make_config, set_memory):
    set_memory(2_000_000)
    auto = make_trainer(make_config("auto", training={"batch_tokens": 512}), device="cpu")
    assert auto.planner.division.micro_batch_tokens < 512
    keys = {"batch_tokens": 512, "micro_batch_tokens": 256}
    trainer = make_trainer(make_config("own", training=keys), device="cpu")
    assert trainer.planner.division.micro_batch_tokens == 256


def test_a_limit_holds_for_the_same_micro_batches(tmp_path):
    assert read_limit(tmp_path, 512) == math.inf
    write_limit(tmp_path, 512, 260.0)
    assert read_limit(tmp_path, 512) == 260.0 and read_limit(tmp_path, 1024) == math.inf
    (tmp_path / LIMIT).write_text("[")
    assert read_limit(tmp_path, 512) == math.inf


def test_a_limit_that_cannot_be_written_is_logged(tmp_path, caplog):
    write_limit(tmp_path / "missing", 512, 260.0)
    assert "the next start does not know that memory ran out" in caplog.text


@pytest.mark.parametrize(
    ("now", "setting", "longest", "fitting", "expected"),
    [
        ("cuda (NVIDIA H200)", "auto", 64, 4096, 1024),
        ("cuda (NVIDIA H200)", "auto", 64, 512, 512),
        ("cuda (NVIDIA H200)", "auto", 1500, 4096, 1500),  # the data has changed
        ("cuda (NVIDIA H200)", 4096, 64, 4096, 4096),
        ("cuda (NVIDIA H200 NVL)", "auto", 64, 4096, 4096),
        ("cpu (AVX2, 2 threads)", "auto", 64, 4096, 4096),
    ],
)
def test_a_run_that_resumes_on_the_same_kind_of_gpu_keeps_its_micro_batches(
    make_config, monkeypatch, now, setting, longest, fitting, expected
):
    training = {"batch_tokens": 4096, "micro_batch_tokens": setting}
    config = make_config(data={"max_length": longest}, training=training)
    corpus = SimpleNamespace(has_fixed_lengths=False)
    monkeypatch.setattr(memory, "micro_batch_tokens", lambda *_: fitting)
    monkeypatch.setattr(memory, "describe_device", lambda _: now)
    state = TrainState(micro_batch_tokens=1024, arithmetic="cuda (NVIDIA H200), bf16, torch 2.13.0, 1 worker")
    learner = SimpleNamespace(device=torch.device(now.partition(" ")[0]))
    assert agree_on_micro_batches(config, corpus, learner, state, Ranks(torch.device("cpu"))) == expected
