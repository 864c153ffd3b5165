"""Worker processes: results in order, errors that are not hidden, and processes that end."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mtrain import processes
from mtrain.errors import DataError
from mtrain.processes import Job, WorkerEndedError, WorkerPool, WorkerProcess, map_tasks, reporting_silence
from mtrain.stop_signals import STOP_SIGNALS
from mtrain.worker_messages import Message

WORKER = "tests.support.worker"  # its processes do what their tasks say
Action = tuple[str, Any]
KILLED = "a worker process was killed by SIGKILL, perhaps because memory ran out; "
REPLACED, ABANDONED = "starting another one", "its work continues in the main process"


def job(settings: Message) -> Job[Action, Any]:
    return Job(
        WORKER,
        settings,
        pack=lambda task: Message({"action": task[0], "value": task[1]}),
        unpack=lambda answer: answer.header["result"],
        local=lambda task: f"local {task[1]}",
    )


def results(tasks: Iterable[Action], workers: int = 2, **settings: str) -> list[Any]:
    """The results of some tasks."""
    return [result for _, result in map_tasks(job(Message(settings)), tasks, workers)]


def test_results_are_in_the_order_of_the_tasks():
    tasks = [("echo", number) for number in range(20)]
    assert list(map_tasks(job(Message({})), tasks, 2)) == [(task, task[1]) for task in tasks]
    assert results(tasks[:2], workers=1) == ["local 0", "local 1"]


def test_all_processes_are_started_before_one_is_waited_for(tmp_path: Path, monkeypatch):
    """Each takes a while to import its modules, and the settings are larger than the buffer of a pipe."""
    gate, settings = tmp_path / "gate", Message({}, (b"x" * 2**20,))
    monkeypatch.setenv("TEST_GATE", str(gate))
    with closing(WorkerPool(WORKER, settings, 2)) as pool:
        gate.touch()
        task = Message({"action": "echo", "value": 1})
        [(_, answer)] = pool.map([task], lambda process, task: process.call(task), lambda task: task)
    assert answer.contents == settings.contents


@pytest.mark.skipif(not hasattr(os, "getsid"), reason="there are no sessions")
def test_a_process_gets_no_ctrl_c_but_shares_the_session_and_its_computing_time():
    with closing(WorkerPool(WORKER, Message({}), 1)) as pool:
        task = Message({"action": "echo", "value": 1})
        [(_, pid)] = pool.map([task], lambda process, _: process.process.pid, lambda _: None)
        assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(0))


def test_processes_that_are_closed_during_their_work_are_not_replaced(caplog):
    """As after a second Ctrl-C."""
    pool = WorkerPool(WORKER, Message({}), 1)
    tasks = [Message({"action": "echo", "value": 1}), Message({"action": "echo", "value": 2})]

    def remote(process, task):
        if task is tasks[1]:
            pool.close()
        return process.call(task)

    with pytest.raises(WorkerEndedError):
        list(pool.map(tasks, remote, lambda task: task))
    assert not caplog.text


@pytest.fixture
def stopped() -> Iterator[tuple[WorkerPool, int]]:
    """A pool of one process, which is stopped, and the process."""
    with closing(WorkerPool(WORKER, Message({}), 1)) as pool:
        [pid] = [answer.header["pid"] for answer in calls(pool, ("echo", 1))]
        os.kill(pid, signal.SIGSTOP)
        yield pool, pid


def calls(pool: WorkerPool, *tasks: Action) -> Iterator[Message]:
    messages = [Message({"action": action, "value": value}) for action, value in tasks]
    return (
        answer for _, answer in pool.map(messages, lambda process, task: process.call(task), lambda _: None)
    )


def test_45_a_stopped_process_is_reported_and_its_work_continues(stopped, monkeypatch, caplog):
    pool, pid = stopped
    monkeypatch.setattr(processes, "SILENCE", 0.5)

    def resume() -> None:
        while not caplog.messages:
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)

    with ThreadPoolExecutor(1) as other:
        resumed = other.submit(resume)
        # A process that computes for longer than SILENCE is not reported.
        assert [answer.header["result"] for answer in calls(pool, ("echo", 1), ("compute", 0.6))] == [1, 0.6]
        resumed.result()
    [message] = caplog.messages
    found = rf"the worker process of {WORKER} \(process {pid}\) has not answered or computed for [01] s"
    assert re.match(found, message)


def test_45_nothing_is_said_of_a_process_whose_computing_time_is_unknown(monkeypatch, caplog):
    """As on systems other than Linux; here, one that has ended."""
    monkeypatch.setattr(processes, "SILENCE", 0.02)
    child = subprocess.Popen(["true"])
    child.wait()
    with reporting_silence(child.pid, "the process"):
        time.sleep(0.2)
    assert not caplog.messages


def test_45_ctrl_c_ends_the_wait_for_a_stopped_process(stopped, monkeypatch):
    pool, pid = stopped
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(calls(pool, ("echo", 1)))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not Path(f"/proc/{pid}").exists()


def test_45_work_that_is_cancelled_does_not_wait_for_a_stopped_process(stopped):
    pool, pid = stopped

    def check() -> None:
        raise CancelledError

    task = Message({"action": "echo", "value": 1})
    with pytest.raises(CancelledError):
        list(pool.map([task], lambda process, task: process.call(task), lambda _: None, check))
    assert not Path(f"/proc/{pid}").exists()


def test_an_error_of_the_user_is_raised_here():
    with pytest.raises(DataError, match="refused: line 3"):
        results([("refuse", "line 3")])


def test_a_bug_is_raised_here_with_the_traceback_of_the_process():
    with pytest.raises(RuntimeError, match="integer division or modulo by zero") as raised:
        results([("divide", 0)])
    assert 'tests/support/worker.py", line' in raised.value.__notes__[0]


def test_an_error_before_the_first_task_is_not_hidden(tmp_path: Path):
    with pytest.raises(RuntimeError, match="No such file or directory"):
        results([("echo", 1)], read=str(tmp_path / "missing"))


def test_a_process_that_is_killed_is_replaced(tmp_path: Path, caplog):
    tasks = [("echo", 0), ("end once", str(tmp_path / "file")), ("echo", 2)]
    assert results(tasks, workers=3) == [0, str(tmp_path / "file"), 2]
    assert caplog.messages == [KILLED + REPLACED]


def test_the_main_process_does_the_work_of_a_process_that_is_killed_again(caplog):
    assert results([("be killed", "task"), ("echo", 1)]) == ["local task", 1]
    assert caplog.messages == [KILLED + REPLACED, KILLED + ABANDONED]


def test_a_signal_that_a_batch_system_sends_to_all_processes_does_not_end_the_workers():
    def send(process: WorkerProcess, task: Message) -> Message:
        for number in STOP_SIGNALS:
            process.process.send_signal(number)
        return process.call(task)

    with closing(WorkerPool(WORKER, Message({}), 1)) as pool:
        task = Message({"action": "echo", "value": 1})
        [(_, answer)] = pool.map([task], send, lambda task: task)
    assert answer.header["result"] == 1


def test_the_exit_code_of_a_process_is_reported(caplog):
    assert results([("exit", 3)]) == ["local 3"]
    assert caplog.messages[0] == f"a worker process ended with exit code 3; {REPLACED}"
