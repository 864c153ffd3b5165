"""Several ranks take the same steps as one with as many micro-batches."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.data.epochs.batching import Batch
from mtrain.distributed.ranks import Ranks
from mtrain.distributed.shards import divided_like, whole
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.learning_rate import encoder_share
from mtrain.training.step.make_learner import make_learner
from mtrain.training.step.optimizer import freeze
from tests.support.ranks import exit_codes, joined, read_logs, run_ranks
from tests.support.training import batches_of, weights

# The rows of each rank in each step. They differ in their number of tokens; a rank may have none. Five steps
# have each kind of step.
STEPS = [([[0, 1, 2]], [[3], [4]]), ([[5, 6]], []), ([[1], [2], [3]], [[7, 0]]), ([], [[4, 5, 6, 7]])]


def train(parts, ranks: Ranks, shares, steps: int, kind="cpu", **recipe) -> dict[str, torch.Tensor]:
    """The metrics of each step, the gradient of the first, and the final weights, of a rank that has the
    given shares of each step. The batches are of the kind that suits a device."""
    config, model, data, tokenizer = parts
    config = config.training.model_copy(update=recipe)
    freeze(model, config.freeze)
    learner, average = make_learner(model, config, ranks), WeightAverage(model, config)
    results = {}
    for step in range(steps):
        rows = STEPS[step % len(STEPS)]
        own = batches_of([part for share in shares for part in rows[share]], data, tokenizer, kind)
        total = sum(
            batch.target_tokens for share in rows for batch in batches_of(share, data, tokenizer, kind)
        )
        if step == 0:
            before = {name: whole(tensor) for name, tensor in weights(model).items()}
            adam, learner.optimizer = learner.optimizer, torch.optim.SGD(model.parameters())
        learner.encoder_share = encoder_share(step + 1, config)
        metrics = learner.step(own or [Batch.without_pairs()], total, 1.0 if step == 0 else 1e-3)
        results[f"metrics.{step}"] = metrics.values
        if step == 0:
            results |= {f"gradient.{name}": before[name] - whole(p) for name, p in weights(model).items()}
            own = model.state_dict()
            model.load_state_dict({name: divided_like(before[name], own[name]) for name in own})
            learner.optimizer = adam
        average.update(step + 1)
    results |= {f"weight.{name}": whole(p) for name, p in weights(model).items()}
    return results | {f"average.{name}": whole(p) for name, p in average.weights.items()}


@pytest.mark.parametrize(
    ("dtype", "steps", "recipe"),
    [
        (torch.float64, 5, {"ema_decay": 0.9, "encoder_after": 3}),
        pytest.param(torch.float32, 5, {"clip_norm": 1.0}, marks=pytest.mark.slow),
        pytest.param(torch.float64, 5, {"optimizer": "muon"}, marks=pytest.mark.slow),
        (torch.float64, 5, {"optimizer": "muon", "weight_decay": 0.1, "parallel": "fsdp"}),
        pytest.param(
            torch.float64,
            5,
            {"clip_norm": 0.1, "encoder_after": 3, "parallel": "fsdp"},
            marks=pytest.mark.slow,
        ),
        pytest.param(torch.float32, 5, {"clip_norm": 1.0, "parallel": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(
            torch.float64,
            5,
            {"freeze": ["encoder", "embeddings"], "r_drop": 5.0, "parallel": "fsdp"},
            marks=pytest.mark.slow,
        ),
        pytest.param(torch.float64, 50, {"ema_decay": 0.9}, marks=pytest.mark.slow),
        pytest.param(torch.float32, 50, {}, marks=pytest.mark.slow),
        pytest.param(torch.float64, 5, {"r_drop": 5.0}, marks=pytest.mark.slow),
        pytest.param(torch.float64, 5, {"r_drop": 5.0, "kind": "cuda"}, marks=pytest.mark.slow),
        pytest.param(torch.float64, 5, {"parallel": "fsdp", "kind": "cuda"}, marks=pytest.mark.slow),
        pytest.param(
            torch.float64,
            5,
            {"freeze": ["encoder", "embeddings"], "label_smoothing": 0.0},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_ranks_take_the_steps_of_one_with_all_micro_batches(parts, tmp_path, dtype, steps, recipe):
    compare(parts, tmp_path, dtype, 2, steps, recipe)


def test_sizes_that_ranks_cannot_divide_evenly_are_padded(parts, tmp_path):
    """The third rank has fewer numbers of each weight than the others, and never a pair."""
    compare(parts, tmp_path, torch.float64, 3, 3, {"ema_decay": 0.9, "clip_norm": 0.1, "parallel": "fsdp"})


def compare(parts, tmp_path, dtype: torch.dtype, count: int, steps: int, recipe) -> None:
    """Compare the steps of some ranks, of which the first two have all pairs, with the steps of one rank."""
    _, model, *_ = parts
    model.to(dtype)
    start, tolerance = weights(model), 1e-10 if dtype == torch.float64 else 1e-5
    if dtype == torch.float32 and steps >= 50:
        tolerance = 1e-3  # AdamW amplifies the differences of rounding from step to step

    def work(ranks: Ranks) -> None:
        if ranks.rank:  # the weights come from rank 0
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        shares = [ranks.rank] if ranks.rank < 2 else []
        save_file(train(parts, ranks, shares, steps, **recipe), tmp_path / f"{ranks.rank}")

    assert exit_codes(run_ranks(count, joined(work), tmp_path)) == [0] * count, read_logs(tmp_path)
    results = [load_file(tmp_path / f"{rank}") for rank in range(count)]
    for other in results[1:]:
        assert results[0].keys() == other.keys()
        assert all(torch.equal(results[0][name], other[name]) for name in other)
    model.load_state_dict(start)
    expected = train(parts, Ranks(torch.device("cpu")), [0, 1], steps, **recipe)
    for name, value in expected.items():
        found = results[0][name]
        if name.endswith("query_key_value.bias"):  # the gradient of the biases of keys is 0 but for rounding
            found, value = (torch.cat(tensor.chunk(3)[::2]) for tensor in (found, value))
        torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance * float(value.abs().max()))


@pytest.mark.parametrize("largest", [pytest.param(2, marks=pytest.mark.slow), 1])
def test_all_ranks_try_again_if_the_memory_of_one_runs_out(parts, tmp_path, on_training_forward, largest):
    """With 2 pairs, only the first micro-batch of rank 1 is too large; with 1, both of them are."""
    config, model, data, tokenizer = parts
    start, shares = weights(model), [[[0, 1, 2, 3]], [[4, 5, 6], [7, 1]]]

    def work(ranks: Ranks) -> None:
        def limit(source, _):
            has_pairs = source.size(1) > Batch.without_pairs().source.size(1)
            if is_limited and ranks.rank == 1 and has_pairs and len(source) > largest:
                raise MemoryError

        on_training_forward(limit)
        batches = [batches_of(rows, data, tokenizer) for rows in shares]
        tokens = sum(batch.target_tokens for share in batches for batch in share)
        for is_limited in (False, True):
            model.load_state_dict(start)
            learner = make_learner(model, config.training, ranks)
            learner.optimizer = torch.optim.SGD(model.parameters(), fused=True)
            values = learner.step(batches[ranks.rank], tokens, 1.0).values
            changes = {name: start[name] - p for name, p in weights(model).items()}
            limits = torch.tensor([learner.max_micro_batch_positions])
            save_file(
                {**changes, "values": values, "limits": limits}, tmp_path / f"{is_limited}-{ranks.rank}"
            )

    assert exit_codes(run_ranks(2, joined(work), tmp_path)) == [0, 0], read_logs(tmp_path)
    expected, *found = (load_file(tmp_path / name) for name in ("False-0", "True-0", "True-1"))
    assert found[0]["limits"] == found[1]["limits"] < expected["limits"] == float("inf")
    for name in expected.keys() - {"limits"}:
        for result in found:
            torch.testing.assert_close(result[name], expected[name], rtol=1e-10, atol=1e-12)
    assert "rank 1: warning: out of memory in 2 micro-batches (5 pairs)" in read_logs(tmp_path)[1]


@pytest.mark.slow
def test_shared_weights_have_the_numbers_of_autocast(parts, tmp_path):
    """In bf16, FSDP gathers the matrices in the precision that autocast converts them to."""
    _, model, *_ = parts
    start = weights(model.float())

    def work(ranks: Ranks) -> None:
        for kind in ("ddp", "fsdp"):
            if kind == "fsdp":
                model.load_state_dict(start)
            results = train(parts, ranks, [ranks.rank], 4, precision="bf16", parallel=kind)
            save_file(results, tmp_path / f"{kind}-{ranks.rank}")

    assert exit_codes(run_ranks(2, joined(work), tmp_path)) == [0, 0], read_logs(tmp_path)
    ddp, fsdp = (load_file(tmp_path / f"{kind}-0") for kind in ("ddp", "fsdp"))
    for name, value in ddp.items():
        if name.startswith(("metrics", "gradient")):
            # A gradient is the difference of weights, each rounded: those of layer norms are about 1.
            rounding = 0.0 if name.startswith("metrics") else torch.finfo(torch.float32).eps
            atol = 1e-5 * float(value.abs().max()) + rounding
            torch.testing.assert_close(fsdp[name], value, rtol=1e-5, atol=atol)
