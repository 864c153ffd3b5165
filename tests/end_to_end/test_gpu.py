"""Training and translating on a GPU gives the same as on the CPU."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from mtrain import Translator
from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.batching import collate
from mtrain.data.epochs.loader import StepInput, largest_batches
from mtrain.data.epochs.packed_batch import AnyBatch, Layout, PackedBatch, pack, split_batches
from mtrain.data.epochs.schedule import Position
from mtrain.decoding.decode import Ensemble, for_decoding
from mtrain.decoding.search.search import search
from mtrain.decoding.sessions.inputs import Batch
from mtrain.device import copy_to_host_async, resolve_device
from mtrain.graph_capture import CaptureError, GraphPool
from mtrain.kernels.cross_entropy import IGNORE
from mtrain.kernels.reproducible import reproducible
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.transformer import Dropout, Transformer
from mtrain.tokenizer.rows import Rows
from mtrain.training import loop
from mtrain.training.fit import fit, make_trainer
from mtrain.training.loop import train_step
from mtrain.training.step.graph_learner import GraphLearner
from mtrain.training.step.learner import Learner, StepMetrics
from mtrain.training.step.make_learner import make_learner
from mtrain.training.trainer import Trainer
from tests.support.faults.saves import Killed
from tests.support.paths import ROOT
from tests.support.search import build, forced, options, sentences, tokens
from tests.support.training import PAIRS, batches_of, losses, same_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_step_gives_the_same_loss_and_weights(parts):
    config, model, data, tokenizer = parts
    results = {}
    for device in ("cpu", "cuda"):
        batches = batches_of([[0, 1, 2], [3, 4]], data, tokenizer, device)
        tokens = sum(batch.target_tokens for batch in batches)
        moved = copy.deepcopy(model).to(
            device
        )  # in fp64: Adam amplifies gradients that are only rounding errors
        recipe = config.training.model_copy(update={"precision": "fp32"})
        sums = Learner(moved, recipe).step(batches, tokens, 0.001)
        results[device] = [sums.values.cpu(), *(p.detach().cpu() for p in moved.parameters())]
    for ours, theirs in zip(results["cpu"], results["cuda"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


# The slow cases take long on a simulated device.
@pytest.fixture(params=["default", pytest.param("cudnn", marks=pytest.mark.slow)])
def attention(request) -> Iterator[str]:
    """Attention as mtrain computes it, and as PyTorch would by itself on recent GPUs."""
    resolve_device("cuda")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param == "cudnn")
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("padded", "packed in a larger layout")]


@pytest.fixture(scope="module", params=["packed", *KINDS])
def example(request) -> tuple[Transformer, AnyBatch, Tensor, list[Tensor]]:
    """A model with heads of usual width, a batch of sentences of different lengths, and its loss and
    gradients in fp64."""
    sizes = {
        "d_model": 128,
        "ffn_dim": 256,
        "heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "dropout": 0.0,
    }
    vocabulary = {"source_vocab_size": 500, "target_vocab_size": 500, "max_positions": 128}
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**sizes, **vocabulary)).train()
    generator = np.random.default_rng(1)
    sides = []
    for _ in range(2):
        rows = [[*generator.integers(4, 500, length), 3] for length in generator.integers(2, 100, 24)]
        sides.append(Rows.from_lists(rows))
    source, target = sides
    batch: AnyBatch = collate(source, target, 0, 2, list(range(24)))
    expected = gradients(model, batch, torch.float64, "cpu", "fp32")
    if request.param != "padded":
        batch = pack(source, target, 2, list(range(24)))
    if request.param == "packed in a larger layout":
        batch = batch.in_layout(Layout(3000, 2900, 64, 128))
    return model, batch, *expected


def gradients(
    model: Transformer, batch: AnyBatch, dtype: torch.dtype, device: str, precision: str
) -> tuple[Tensor, list[Tensor]]:
    """The mean loss of a batch, and the gradient of each parameter, in fp64 on the CPU, computed in parts of
    different sizes."""
    copied = copy.deepcopy(model).to(dtype)
    copied.embed.make_positions()
    recipe = TrainingConfig(max_steps=1, precision=precision)
    learner = Learner(copied.to(device), recipe)
    total, scale = torch.zeros((), dtype=torch.float64), learner.loss_scaler.scale
    for part in split_batches([batch], batch.positions / 3):
        loss = learner.loss(learner.model, part).loss / batch.target_tokens
        (loss * scale).backward()
        total += loss.detach().cpu()
    found = (p.grad for p in copied.parameters() if p.grad is not None)
    return total, [(gradient / scale).double().cpu() for gradient in found]


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        pytest.param("fp32", 1e-3, marks=pytest.mark.slow),
        pytest.param("fp16", 2e-2, marks=pytest.mark.slow),
        ("bf16", 5e-2),
    ],
)
def test_gradients_are_those_of_fp64(example, attention, precision, tolerance):
    if attention == "cudnn" and precision == "fp32":
        pytest.skip("cuDNN has no kernel for fp32")
    model, batch, expected_loss, expected = example
    loss, found = gradients(model, batch, torch.float32, "cuda", precision)
    errors = [
        float((ours - other).norm() / other.norm()) for ours, other in zip(found, expected, strict=True)
    ]
    print(f"numbers, {precision}: relative errors of gradients: median {median(errors):.1e}")
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance / 10, atol=0.0)
    assert median(errors) <= tolerance and max(errors) <= 4 * tolerance


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 5])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp16", 1e-2), ("bf16", 1e-1)])
def test_log_probabilities_of_translations_are_those_of_fp64(attention, precision, tolerance, beams):
    model = build(
        1, vocab=50, d_model=128, heads=2, ffn_dim=256, encoder_layers=2, decoder_layers=2, max_positions=64
    )
    source, keep = sentences(model, [31, 2, 17, 16, 5, 1])
    config = options(beam_size=beams)
    exact = search([DecodingTransformer(model)], source, keep, config)
    on_gpu = copy.deepcopy(model).float()
    on_gpu.embed.make_positions()
    ensemble = for_decoding(Ensemble([on_gpu.to("cuda")], None, torch.device("cuda")), precision)
    rows = [ids[kept].tolist() for ids, kept in zip(source, keep, strict=True)]
    results = [search(ensemble.models, source.cuda(), keep.cuda(), config)]
    results += [
        ensemble.sessions.search(Batch(rows, config)) for _ in range(3)
    ]  # without graphs, then with graphs
    for found in results:
        for row, ([best, *_], [other, *_]) in enumerate(zip(found, exact, strict=True)):
            [log_prob] = forced(model, source[row], keep[row], [tokens(best, model.config.eos_id)])
            assert best.log_prob == pytest.approx(log_prob, abs=tolerance * (len(best.ids) + 1))
            assert best.ids == other.ids or precision != "fp32"
    assert results[2] == results[3]


@pytest.mark.skipif(not distributed.is_nccl_available(), reason="needs NCCL")
def test_a_rank_that_uses_nccl_takes_the_same_steps():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "tests.support.nccl_rank"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "DDP and FSDP are right" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("precision", "setting", "has_head", "optimizer"),
    [
        ("fp32", "off", False, "adamw"),
        ("bf16", "off", True, "muon"),
        pytest.param("fp16", "off", True, "muon", marks=pytest.mark.slow),
        pytest.param("bf16", "auto", False, "adamw", marks=pytest.mark.slow),
    ],
)
def test_a_step_never_waits_for_the_device(parts, precision, setting, has_head, optimizer):
    config, model, data, tokenizer = parts
    model.config = model.config.model_copy(update={"alignment_head": has_head})
    changes = {"precision": precision, "clip_norm": 1.0, "optimizer": optimizer}
    recipe = config.training.model_copy(update=changes)
    learner = make_learner(model.float().to("cuda"), recipe.model_copy(update={"cuda_graphs": setting}))
    batches = [batch.pinned() for batch in batches_of([[0, 1, 2], [3, 4]], data, tokenizer, "cuda")]
    tokens = sum(batch.target_tokens for batch in batches)
    learner.step(batches, tokens, 0.001)  # the first step initializes libraries
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = copy_to_host_async(learner.step(batches, tokens, 0.001).values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read()[0] > 0


@pytest.mark.slow
def test_dropout_depends_on_the_generator_of_the_cpu_only(parts):
    config, model, data, tokenizer = parts
    for module in model.modules():
        if isinstance(module, Dropout):
            module.rate = 0.3
    learner = Learner(model.float().to("cuda"), config.training)
    (batch,) = batches_of([[0, 1, 2]], data, tokenizer)
    state = torch.get_rng_state()
    drawn = [float(learner.loss(learner.model, batch).loss) for _ in range(2)]
    torch.set_rng_state(state)
    learner.dry_run(batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert [float(learner.loss(learner.model, batch).loss) for _ in range(2)] == drawn
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(("is_student", "optimizer"), [(False, "adamw"), (True, "adamw"), (False, "muon")])
@pytest.mark.parametrize(
    ("precision", "tolerance", "batch_tokens"),
    [("fp32", 1e-4, 200), pytest.param("bf16", 2e-2, 64, marks=pytest.mark.slow)],
)
def test_steps_as_graphs_are_those_without(
    make_config, precision, tolerance, batch_tokens, is_student, optimizer
):
    """With the same dropout, several micro-batches, and graphs for other shapes; for students with an
    alignment head and an encoder that is frozen first."""
    model = {"dropout": 0.2, "word_dropout": 0.1}
    model |= {"alignment_head": True, "norm": "post", "attention_dropout": 0.1} if is_student else {}
    values = []
    for setting in ("auto", "off"):
        training = {"precision": precision, "cuda_graphs": setting, "optimizer": optimizer}
        training |= {"micro_batch_tokens": 64, "batch_tokens": batch_tokens, "encoder_after": 2 * is_student}
        config = make_config(setting, model=model, training=training)
        trainer = make_trainer(config, device="cuda")
        steps = [train_step(trainer, step).values.tolist() for step in islice(trainer.steps(), 4)]
        values.append(torch.tensor(steps))
        assert (trainer.learner.captures > 0) == (setting == "auto")
    torch.testing.assert_close(values[0], values[1], rtol=tolerance, atol=0)


def test_a_run_uses_graphs(make_config):
    learner = make_trainer(make_config(), device="cuda").learner
    batch = PackedBatch.of_size(3, 5)
    for _ in range(2):
        learner.step([batch.pinned()], batch.target_tokens, 0.0)
    assert isinstance(learner, GraphLearner) and learner.uses_graphs and learner.captures == 1


def test_work_is_captured_after_other_work_could_not_be():
    number, pool = torch.zeros(1, device="cuda"), GraphPool(torch.device("cuda"))

    def wait() -> None:
        number.add_(1)
        number.tolist()

    def add() -> None:
        number.add_(2)

    earlier = pool.capture(add)
    with pytest.raises(CaptureError, match="captur"):
        pool.capture(wait)
    replays = [earlier, pool.capture(add)]
    number.zero_()
    for replay in replays:
        replay()
    assert number.tolist() == [4]


def test_batches_are_in_pinned_memory(make_config):
    trainer = make_trainer(make_config(), device="cuda")
    batch = largest_batches(trainer.loader, trainer.planner.open(Position()))[0]
    assert batch.buffer.is_pinned() and split_batches([batch], 0)[-1].buffer.is_pinned()


def test_its_batches_are_those_of_a_cpu(make_config):
    """The same pairs in the same order, with the same tokens, in the same micro-batches."""
    config = make_config(training={"micro_batch_tokens": 64})
    steps = [
        list(islice(make_trainer(config, device=device).loader.steps(), 8)) for device in ("cpu", "cuda")
    ]
    for padded, packed in zip(*steps, strict=True):
        assert (padded.tokens, padded.locate()) == (packed.tokens, packed.locate())
        for one, other in zip(padded.batches, packed.batches, strict=True):
            assert (one.rows, one.target_tokens) == (other.rows, other.target_tokens)
            assert torch.equal(one.labels[one.labels != IGNORE], other.labels)
            assert torch.equal(one.source[one.source_keep].int(), other.inputs().source)
            assert torch.equal(one.target_in[one.labels != IGNORE].int(), other.inputs().target_in)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_translations_equal_those_of_the_cpu(run_dir, precision):
    translator = Translator.load(run_dir, "cuda", [f"decoding.precision={precision}"])
    assert [t.text for t in translator.translate([source for source, _ in PAIRS])] == [
        pair[1] for pair in PAIRS
    ]


@pytest.mark.slow
def test_a_run_with_every_dropout_trains_in_bf16_and_resumes(make_config, caplog):
    caplog.set_level("INFO", "mtrain")
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "word_dropout": 0.1}
    recipe = {"r_drop": 1.0, "precision": "bf16"}
    for steps in (8, 40):
        config = make_config(model=rates, training={**recipe, "max_steps": steps})
        fit(config, device="cuda")
    history = losses(Path(config.run_dir))
    assert "not bit-identically" not in caplog.text
    assert history[-1][0] == 40 and history[-1][3] < history[0][3]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_killed_between_checkpoints_resumes_to_the_same_weights(
    make_config, monkeypatch, caplog, precision
):
    """With accumulation. `scripts/gpu_check.sh` sends the real signal."""
    caplog.set_level("INFO", "mtrain")
    real = loop.train_step

    def die(trainer: Trainer, step: StepInput) -> StepMetrics:
        if trainer.state.step == 5:
            raise Killed
        return real(trainer, step)

    model = {"dropout": 0.1, "attention_dropout": 0.1, "positions": "learned"}
    recipe = {"precision": precision, "batch_tokens": 128, "micro_batch_tokens": 64}
    recipe |= {"max_steps": 7, "checkpoint_every": 3, "validate_every": 7}
    config = make_config("whole", model=model, training=recipe)
    fit(config, device="cuda")
    killed = make_config("killed", model=model, training=recipe)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(loop, "train_step", die)
        fit(killed, device="cuda")
    fit(killed, device="cuda")
    assert "resuming from" in caplog.text and "not bit-identically" not in caplog.text
    assert same_weights(Path(config.run_dir), Path(killed.run_dir))


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_attention_to_long_sequences_do_not_vary(masked):
    """The fused kernels, of which one takes a mask, add gradients atomically by default."""
    torch.manual_seed(1)
    device = resolve_device("cuda")
    inputs = [torch.randn(2, 4, 2048, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    keep = torch.ones(2, 1, 1, 2048, device=device, dtype=torch.bool) if masked else None

    def gradients() -> list[Tensor]:
        query, key, value = leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with reproducible(device):
            F.scaled_dot_product_attention(query, key, value, keep).float().square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(first, gradients(), strict=True))
