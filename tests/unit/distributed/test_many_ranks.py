"""What two ranks agree on."""

import json
import os

import pytest
import torch

from mtrain.distributed.many_ranks import joined_ranks
from mtrain.distributed.ranks import Ranks
from mtrain.errors import DistributedError, ModelError, StorageError, UsageError
from tests.support.devices import pretend
from tests.support.ranks import exit_codes, joined, read_logs, run_ranks


@pytest.fixture
def results_of(tmp_path):
    """Run a function on two ranks, and return its results, which JSON can represent."""

    def run(work) -> list:
        def write(ranks: Ranks) -> None:
            (tmp_path / f"result-{ranks.rank}").write_text(json.dumps(work(ranks)))

        assert exit_codes(run_ranks(2, joined(write), tmp_path)) == [0, 0], read_logs(tmp_path)
        return [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(2)]

    return run


def test_values_travel_between_ranks(results_of):
    def work(ranks: Ranks) -> list:
        sums = torch.tensor([1.0 + ranks.rank, 10.0])
        complete = ranks.start_all_reduce(sums)
        complete()
        ranks.barrier()
        return [
            [ranks.rank, ranks.size, ranks.local_size, ranks.is_first],
            ranks.all_reduce_max(ranks.rank, -ranks.rank, float("-inf")),
            sums.tolist(),
            ranks.broadcast({"text": "ü", "none": None} if ranks.is_first else None),
        ]

    common = [[1.0, 0.0, float("-inf")], [3.0, 20.0], {"text": "ü", "none": None}]
    assert results_of(work) == [[[0, 2, 2, True], *common], [[1, 2, 2, False], *common]]


def test_an_error_of_one_rank_is_raised_on_all(results_of):
    def work(ranks: Ranks) -> list:
        with ranks.agreed():
            value = "x" * ranks.rank
        values = ranks.gather(value)
        errors = []
        for failing, error in (
            (1, ModelError("damaged")),
            (0, StorageError("full")),
            (1, MemoryError("short")),
        ):
            try:
                with ranks.agreed():
                    if ranks.rank == failing:
                        raise error
            except (ModelError, StorageError, MemoryError) as found:
                errors.append([type(found).__name__, str(found)])
        return [values, errors]

    first, second = results_of(work)
    assert first[0] == second[0] == ["", "x"]
    remote = [["ModelError", "rank 1: damaged"], ["StorageError", "full"], ["MemoryError", "rank 1: short"]]
    assert first[1] == remote
    assert second[1] == [["ModelError", "damaged"], ["StorageError", "full"], ["MemoryError", "short"]]


def test_each_rank_draws_other_random_numbers_in_each_step(results_of):
    def work(ranks: Ranks) -> list:
        drawn = []
        for seed, step in ((1, 1), (1, 2), (2, 1), (1, 1)):
            ranks.seed_step(seed, step)
            drawn.append(torch.rand(()).item())
        return drawn

    first, second = results_of(work)
    assert first[0] == first[3] and second[0] == second[3]
    assert len({*first, *second}) == 6


def test_a_process_without_others_agrees_with_itself():
    with joined_ranks("cpu") as ranks:
        values = torch.ones(2)
        ranks.start_all_reduce(values)()
        assert values.tolist() == [1, 1] and ranks.all_reduce_max(3, -1) == [3, -1]
        assert ranks.broadcast("a") == "a" and ranks.gather([0, 1]) == [[0, 1]]
        before = torch.get_rng_state()
        ranks.seed_step(1, 1)
        assert torch.equal(before, torch.get_rng_state())


def test_nccl_does_not_end_the_process_before_its_message(results_of, monkeypatch):
    """1, the setting of torchrun, ends it; other settings are the user's."""
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

    def work(ranks: Ranks) -> str:
        return os.environ[variable]

    for given, kept in (("1", "2"), ("3", "3")):
        monkeypatch.setenv(variable, given)
        assert results_of(work) == [kept, kept]


def test_each_rank_of_a_machine_uses_the_gpu_of_its_number(tmp_path, monkeypatch):
    """Shown with two ranks and a single GPU that exists in name only: the second rank misses its own."""
    pretend(monkeypatch, "cuda")
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def work() -> None:
        def report() -> None:
            with joined_ranks("auto"):
                pass

        if os.environ["RANK"] == "1":
            with pytest.raises(UsageError, match="has started 2 processes on this machine, which has 1 GPUs"):
                report()
            return
        with pytest.raises(DistributedError, match="rank 1 ended: torchrun has started 2 processes"):
            report()
        assert chosen == [torch.device("cuda:0")]

    assert exit_codes(run_ranks(2, work, tmp_path)) == [0, 0], read_logs(tmp_path)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:1", "--device cuda:1: torchrun gives each process a GPU; give --device cuda or auto"),
        ("auto", "--device auto: several processes cannot use xpu; give --device cpu"),
        ("xpu:0", "--device xpu:0: several processes cannot use xpu:0; give --device cpu"),
    ],
)
def test_what_several_ranks_cannot_use_is_an_error(tmp_path, monkeypatch, device, message):
    pretend(monkeypatch, "xpu", 2)

    def work() -> None:
        with pytest.raises(UsageError, match=message), joined_ranks(device):
            pass

    assert exit_codes(run_ranks(2, work, tmp_path)) == [0, 0], read_logs(tmp_path)
