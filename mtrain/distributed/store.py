"""What ranks tell each other through the key-value store of torchrun: before they are connected, and after
they have lost each other."""

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from mtrain.distributed.launch import Launch
from mtrain.distributed.ranks import JsonValue
from mtrain.errors import DistributedError, is_out_of_memory

START_TIMEOUT = timedelta(minutes=30)  # for all ranks to start
GRACE = 5.0  # seconds in which other ranks answer
CALL_TIMEOUT = 30.0  # seconds in which the store answers


class LostRankError(DistributedError, exit_code=7):
    """Another rank has ended, or does not respond."""


class _PromptStore:
    """A store whose calls raise RuntimeError if there is no answer within CALL_TIMEOUT. PyTorch waits without
    end for a machine that has stopped."""

    def __init__(self, store: Any):
        self._store = store

    def set(self, key: str, value: str) -> None:
        _within(CALL_TIMEOUT, lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key, which must exist."""
        return _within(CALL_TIMEOUT, lambda: self._store.get(key))  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        return _within(CALL_TIMEOUT, lambda: self._store.check(keys))  # type: ignore[no-any-return]


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of a call in a thread, which is left behind if it takes longer. Raises RuntimeError then."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, name="store", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        raise RuntimeError(f"the store of torchrun did not answer within {seconds:g} seconds") from None


class RankStore:
    """torchrun's key-value store, as far as the ranks of a command use it."""

    def __init__(self, launch: Launch):
        """Raises DistributedError if the store cannot be reached."""
        self.rank, self.size = launch.rank, launch.size
        self.hosts = [""] * self.size  # names of the ranks' machines, for messages
        self._rounds = 0  # of `exchange`
        try:
            store = next(rendezvous("env://", timeout=START_TIMEOUT))[0]
        except (RuntimeError, ValueError) as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise DistributedError(f"cannot reach the other ranks at {place}: {_first_line(error)}") from None
        store = PrefixStore("mtrain", store)
        with _naming_lost_store():
            store = PrefixStore(self._assemble(_PromptStore(store)), store)
        self._store = _PromptStore(store)
        self.groups = PrefixStore("groups", store)  # for the process groups

    def _assemble(self, store: _PromptStore) -> str:
        """Wait until all ranks are here, and return a name for them.

        The store may be left over from failed ranks, which torchrun has started again. Therefore each
        process has a name, of which rank 0 makes lists. A list is valid once all of its processes confirm it.
        """
        own = uuid.uuid4().hex
        store.set(f"process/{self.rank}", own)
        processes, name = [f"process/{rank}" for rank in range(self.size)], ""

        def confirmations() -> list[str]:
            return [f"{name}/confirmed/{rank}" for rank in range(self.size)]

        def is_confirmed() -> bool:
            nonlocal name
            if self.rank == 0 and store.check(processes):
                found = [store.get(key).decode() for key in processes]
                if not store.check(["list"]) or json.loads(store.get("list"))[1] != found:
                    store.set("list", json.dumps([uuid.uuid4().hex, found]))
            if store.check(["list"]):
                listed, members = json.loads(store.get("list"))
                if members[self.rank : self.rank + 1] == [own]:  # an earlier list may be shorter
                    name = listed
                    store.set(f"{name}/confirmed/{self.rank}", "")
            return bool(name) and store.check(confirmations())

        self._wait(store, is_confirmed, confirmations)
        return name

    def _wait(
        self, store: _PromptStore, condition: Callable[[], bool], keys: Callable[[], list[str]]
    ) -> None:
        """Wait until a condition holds. Raises DistributedError that names the ranks whose `keys` are missing
        when the time is up."""
        end, pause = time.monotonic() + START_TIMEOUT.total_seconds(), 0.01
        while not condition():
            is_late = time.monotonic() > end
            # None may be missing by now: the last rank has answered just after `condition` was false.
            if is_late and (missing := [rank for rank, key in enumerate(keys()) if not store.check([key])]):
                raise DistributedError(f"{_names(missing)} did not answer within {START_TIMEOUT}")
            time.sleep(pause := min(2 * pause, 0.5))

    def exchange(self, value: JsonValue) -> list[JsonValue]:
        """The values that all ranks give. Raises DistributedError if a rank ends before it gives one, or does
        not give one in time."""
        self._rounds += 1
        keys = [f"round-{self._rounds}/{rank}" for rank in range(self.size)]
        with _naming_lost_store():
            self._store.set(keys[self.rank], json.dumps(value))
            self._wait(self._store, lambda: self._are_given(keys), lambda: keys)
            return [json.loads(self._store.get(key)) for key in keys]

    def _are_given(self, keys: list[str]) -> bool:
        """Whether all ranks have given a value. Raises LostRankError if one has ended instead."""
        has_ended = self._store.check(["ended"])  # first: a rank may give its value and end at any time
        if self._store.check(keys):
            return True
        if has_ended and (ends := self._notes("end", range(self.size))):
            raise self._ended(ends)
        return False

    def _leave_note(self, key: str, note: JsonValue) -> None:
        """Leave a note that the other ranks can read even when this one has ended."""
        self._store.set(f"{key}/{self.rank}", json.dumps(note))

    def _notes(self, key: str, ranks: Sequence[int]) -> dict[int, JsonValue]:
        found = [rank for rank in ranks if self._store.check([f"{key}/{rank}"])]
        return {rank: json.loads(self._store.get(f"{key}/{rank}")) for rank in found}

    def report_end(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        if not isinstance(error, LostRankError):  # they have lost the same rank
            message = "out of memory" if is_out_of_memory(error) else str(error) or type(error).__name__
            with suppress(RuntimeError):  # the store is lost if its machine is
                self._leave_note("end", _first_line(message))
                self._store.set("ended", "")  # one key to look at while waiting for many ranks

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A context manager in which a thread answers other ranks that ask whether this one is there."""
        ended = Event()

        def answer() -> None:
            with suppress(RuntimeError):
                while not ended.wait(1.0):
                    if self._store.check(["ask"]):
                        self._leave_note("here", True)
                        return

        thread = Thread(target=answer, name="answering", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def find_lost_ranks(self, error: RuntimeError) -> LostRankError:
        """Find out which ranks are lost, after an error of the connection. A lost rank has reported why it
        ended, or does not answer, or hangs and has not noticed the error. No rank can be named if the store
        is lost, too."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        is_late = re.search(r"[Tt]imed? ?out", str(error))
        deadline = time.monotonic() + GRACE
        try:
            self._store.set("ask", "")
            self._leave_note("lost", True)
            while True:
                ends, lost = self._notes("end", others), self._notes("lost", others)
                if ends or len(lost) == len(others) or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            here = lost if is_late or ends else lost | self._notes("here", others)
        except RuntimeError:
            host = os.environ.get("MASTER_ADDR")
            return LostRankError(
                f"the connection between the ranks is lost: {_first_line(error)}; torchrun on {host} "
                "does not respond either; look at that machine, then run the same command again to resume"
            )
        if ends:
            return self._ended(ends)
        if not (missing := [rank for rank in others if rank not in here]):
            return LostRankError(f"the connection between the ranks is lost: {_first_line(error)}")
        what = "did not respond in time" if is_late else "ended without a message; perhaps it was killed"
        return LostRankError(f"{self._describe(missing)} {what}; run the same command again to resume")

    def _ended(self, ends: Mapping[int, JsonValue]) -> LostRankError:
        rank, message = min(ends.items())
        return LostRankError(f"{self._describe([rank])} ended: {message}")

    def _describe(self, ranks: Sequence[int]) -> str:
        """The ranks and, once these are known, their machines."""
        hosts = ", ".join(dict.fromkeys(self.hosts[rank] for rank in ranks if self.hosts[rank]))
        return f"{_names(ranks)} on {hosts}" if hosts else _names(ranks)


def require_equal_facts(facts: Sequence[Mapping[str, str]]) -> None:
    """Raise DistributedError if a fact differs between a rank and rank 0."""
    for rank, of_rank in enumerate(facts):
        for key in sorted(facts[0].keys() | of_rank.keys()):
            one, other = (found.get(key, "missing") for found in (of_rank, facts[0]))
            if one != other:
                raise DistributedError(
                    f"rank {rank}: {key} is {one}, but {other} on rank 0; "
                    "start all ranks with the same command, config and versions"
                )


def require_own_gpus(places: Sequence[str | None]) -> None:
    """Raise DistributedError if two ranks have the same GPU. None stands for a rank without one."""
    for rank, place in enumerate(places):
        first = places.index(place)
        if place is not None and first != rank:
            raise DistributedError(
                f"ranks {first} and {rank} use the same GPU ({place}); "
                "start one process for each GPU with torchrun --nproc-per-node"
            )


@contextmanager
def _naming_lost_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"the connection between the ranks is lost: {_first_line(error)}") from error


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _first_line(error: object) -> str:
    """The first line of an error and, of NCCL's, the one that tells the reason."""
    first, *others = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    reason = others[others.index("Last error:") + 1 :][:1] if "Last error:" in others else []
    return ": ".join([first, *reason])
