"""Several ranks train a pair classifier like one with as many micro-batches."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.batching import Batch
from mtrain.distributed.ranks import Ranks
from mtrain.distributed.shards import whole
from mtrain.model.build import build_model
from mtrain.training.step.make_learner import make_learner
from tests.support.ranks import exit_codes, joined, read_logs, run_ranks
from tests.support.training import weights

SIZES = {
    "d_model": 16,
    "heads": 2,
    "ffn_dim": 24,
    "encoder_layers": 2,
    "head": "pair_classifier",
    "dropout": 0.0,
}
# The pairs of each rank in each step; the second rank has none in the last one.
STEPS = [([0, 1], [2, 3, 4]), ([5], [6, 7]), ([1, 2, 3], [])]


def batch(rows: list[int]) -> Batch:
    """Pairs "source EOS target EOS" of different lengths, and their classes."""
    if not rows:
        return Batch.without_pairs()
    generator = torch.Generator().manual_seed(rows[0])
    ids = torch.randint(5, 30, (len(rows), 6 + rows[0]), generator=generator)
    ids[:, 2] = ids[:, -1] = 3
    ones = torch.ones(len(rows), 1, dtype=torch.int64)
    return Batch(
        ids, torch.ones_like(ids, dtype=torch.bool), ones, torch.tensor(rows)[:, None] % 2, len(rows), rows
    )


def train(ranks: Ranks, shares: list[int], **recipe) -> dict[str, torch.Tensor]:
    """The metrics of each step, and the final weights, of a rank that has the given shares of each step."""
    torch.manual_seed(1)
    model = build_model(ModelConfig(**SIZES, source_vocab_size=30, target_vocab_size=30, max_positions=20))
    config = TrainingConfig(max_steps=3, label_smoothing=0.1, precision="fp32", **recipe)
    learner, results = make_learner(model.double(), config, ranks), {}
    for step, rows in enumerate(STEPS):
        metrics = learner.step([batch(rows[share]) for share in shares], sum(map(len, rows)), 1e-3)
        results[f"metrics.{step}"] = metrics.values
    return results | {name: whole(p) for name, p in weights(model).items()}


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_take_the_steps_of_one(tmp_path, kind):
    def work(ranks: Ranks) -> None:
        save_file(train(ranks, [ranks.rank], parallel=kind), tmp_path / f"{ranks.rank}")

    assert exit_codes(run_ranks(2, joined(work), tmp_path)) == [0, 0], read_logs(tmp_path)
    expected = train(Ranks(torch.device("cpu")), [0, 1])
    for rank in range(2):
        found = load_file(tmp_path / f"{rank}")
        for name in expected.keys() - {name for name in expected if name.endswith("query_key_value.bias")}:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-8, atol=1e-10)
