"""What ranks must have in common, what each must have for itself, and what ends their waiting."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from mtrain.distributed import store
from mtrain.distributed.many_ranks import ManyRanks
from mtrain.distributed.ranks import Ranks
from mtrain.distributed.store import LostRankError, require_equal_facts, require_own_gpus
from mtrain.errors import DataError, DistributedError
from tests.support.ranks import STORE, exit_codes, joined, read_logs, run_ranks


def test_a_difference_names_the_rank_and_the_key():
    facts = {"seed": "1", "data.folder": '"a"'}
    require_equal_facts([facts, facts])
    with pytest.raises(DistributedError, match=r'rank 2: data\.folder is "b", but "a" on rank 0; start all'):
        require_equal_facts([facts, facts, {**facts, "data.folder": '"b"'}])
    with pytest.raises(DistributedError, match="rank 1: seed is missing, but 1 on rank 0"):
        require_equal_facts([facts, {"data.folder": '"a"'}])


def test_the_reason_that_nccl_gives_is_in_the_message(tmp_path):
    error = (
        "NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
        "ncclSystemError: System call failed.\nLast error:\n"
        "Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888)\n"
    )
    message = (
        "the connection between the ranks is lost: NCCL error in: .*: Error while creating shared memory"
    )

    def fail(ranks: Ranks) -> None:
        with pytest.raises(LostRankError, match=message), ranks.watched():
            raise dist.DistBackendError(error)

    assert exit_codes(run_ranks(2, joined(fail), tmp_path)) == [0, 0], read_logs(tmp_path)


def test_two_ranks_must_not_use_the_same_gpu():
    require_own_gpus(["0 on a", "1 on a", "0 on b"])
    require_own_gpus([None, None])
    with pytest.raises(
        DistributedError, match=r"ranks 1 and 2 use the same GPU \(1 on a\); .* --nproc-per-node"
    ):
        require_own_gpus(["0 on a", "1 on a", "1 on a"])


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path):
    def work(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise DataError("damaged")
        with pytest.raises(DistributedError, match=r"^rank 1 on .+ ended: damaged$"):
            ranks.require_equal({"seed": "1"})

    assert exit_codes(run_ranks(2, joined(work), tmp_path))[0] == 0, read_logs(tmp_path)


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_rank_may_end_once_it_has_given_its_value(tmp_path, monkeypatch, looks_first):
    """Before another rank looks for the value, or just after it has looked."""
    has_looked, check = multiprocessing.get_context("fork").Event(), PrefixStore.check

    def check_late(prefixed: PrefixStore, keys: list[str]) -> bool:
        if keys == ["ask"]:  # by the thread that answers other ranks
            return check(prefixed, keys)
        was_found = check(prefixed, keys)
        has_looked.set()
        while not check(prefixed, ["ended"]):
            time.sleep(0.01)
        return was_found if looks_first else check(prefixed, keys)

    def work(ranks: ManyRanks) -> None:
        if ranks.rank == 1:
            has_looked.wait()
            ranks.store.exchange("b")
            raise DataError("damaged")
        monkeypatch.setattr(PrefixStore, "check", check_late)
        assert ranks.store.exchange("a") == ["a", "b"]

    assert exit_codes(run_ranks(2, joined(work), tmp_path))[0] == 0, read_logs(tmp_path)


def test_a_rank_may_answer_just_before_the_time_is_up(tmp_path, monkeypatch):
    has_looked, check = multiprocessing.get_context("fork").Event(), PrefixStore.check

    def check_late(prefixed: PrefixStore, keys: list[str]) -> bool:
        was_found = check(prefixed, keys)
        if len(keys) == 2:  # the values of both ranks
            has_looked.set()
            while not check(prefixed, keys):
                time.sleep(0.01)
        return was_found

    def work(ranks: ManyRanks) -> None:
        if ranks.rank == 1:
            has_looked.wait()
        else:
            monkeypatch.setattr(PrefixStore, "check", check_late)
            monkeypatch.setattr(store, "START_TIMEOUT", timedelta(0))
        assert ranks.store.exchange(ranks.rank) == [0, 1]

    assert exit_codes(run_ranks(2, joined(work), tmp_path)) == [0, 0], read_logs(tmp_path)


def test_ranks_that_do_not_answer_are_named(tmp_path, monkeypatch):
    def work(ranks: ManyRanks) -> None:
        monkeypatch.setattr(store, "START_TIMEOUT", timedelta(seconds=1))
        if os.environ["RANK"] != "0":
            time.sleep(3)
            return
        with pytest.raises(DistributedError, match=r"^ranks 1, 2 did not answer within 0:00:01$"):
            ranks.store.exchange("value")

    assert exit_codes(run_ranks(3, joined(work), tmp_path))[0] == 0, read_logs(tmp_path)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_no_rank_is_named_if_the_store_is_lost(tmp_path, monkeypatch, end):
    """A store on a machine that has stopped does not answer, and does not close the connection either."""
    monkeypatch.setattr(store, "CALL_TIMEOUT", 1.0)

    def work(ranks: Ranks) -> None:
        ranks.barrier()
        if ranks.rank == 0:
            os.kill(int(os.environ[STORE]), end)
            time.sleep(0.2)
            os._exit(3)
        with pytest.raises(
            DistributedError, match=r"^the connection between the ranks is lost: .+; torchrun on localhost"
        ):
            ranks.barrier()
        with pytest.raises(DistributedError, match="connection between the ranks is lost"):
            ranks.require_equal({"seed": "1"})

    start = time.monotonic()
    # What ranks do at their end without a store takes another call.
    assert exit_codes(run_ranks(2, joined(work), tmp_path)) == [3, 0], read_logs(tmp_path)
    assert time.monotonic() - start < 60
