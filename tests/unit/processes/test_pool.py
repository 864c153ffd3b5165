"""Worker processes: results in order, errors that are not hidden, and processes that end."""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtrain.errors import DataError, ModelError
from mtrain.processes.pool import (
    Prepare,
    WorkerEndedError,
    WorkerPool,
    WorkerProcess,
    map_tasks,
    reporting_silence,
)
from mtrain.processes.stop_signals import STOP_SIGNALS
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.worker import Action, prepare

WORKER = "tests.support.worker"  # its processes do what their tasks say
PREPARE = partial(prepare)
ECHO = Action("echo", 1)
KILLED = "a worker process was killed by SIGKILL, perhaps because memory ran out; "
REPLACED, ABANDONED = "starting another one", "its work continues in the main process"


def local(task: Action) -> str:
    """What this process answers in place of a worker process."""
    return f"local {task.value}"


def results(*tasks: tuple[str, Any], workers: int = 2, prepare: Prepare = PREPARE) -> list[Any]:
    """The results of some tasks."""
    done = map_tasks(local, prepare, (Action(*task) for task in tasks), workers)
    return [result for _, result in done]


def test_results_are_in_the_order_of_the_tasks():
    tasks = [Action("echo", number) for number in range(20)]
    assert list(map_tasks(local, PREPARE, tasks, 2)) == [(task, task.value) for task in tasks]
    assert results(*tasks[:2], workers=1) == ["local 0", "local 1"]


def test_a_tokenizer_that_is_gone_when_a_process_loads_it_is_an_error(run_dir: Path, tmp_path: Path):
    tokenizer = Tokenizer(Path(shutil.copytree(run_dir / "tokenizer", tmp_path / "tokenizer")))
    assert results(("echo", tokenizer))[0].fingerprint == tokenizer.fingerprint
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(ModelError, match=r"joint\.model: cannot read the tokenizer: No such file"):
        results(("echo", tokenizer))


def test_what_a_process_prints_while_python_starts_is_no_answer(tmp_path: Path, monkeypatch):
    """`N.` would be a pickled None."""
    (tmp_path / "sitecustomize.py").write_text("print('N.'); print('N.', end='', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert results(ECHO, ("echo", 2)) == [1, 2]


def test_all_processes_are_started_before_one_is_waited_for(tmp_path: Path, monkeypatch):
    """Each takes a while to import its modules, and the settings are larger than the buffer of a pipe."""
    gate, settings = tmp_path / "gate", b"x" * 2**20
    monkeypatch.setenv("TEST_GATE", str(gate))
    with closing(WorkerPool(partial(prepare, settings=settings), 2)) as pool:
        gate.touch()
        assert list(calls(pool, Action("settings", None))) == [settings]


@pytest.mark.skipif(not hasattr(os, "getsid"), reason="there are no sessions")
def test_a_process_gets_no_ctrl_c_but_shares_the_session_and_its_computing_time():
    with closing(WorkerPool(PREPARE, 1)) as pool:
        [pid] = calls(pool, Action("pid", None))
        assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(0))


@pytest.mark.parametrize(("own", "expected"), [(None, "1000"), ("7", "7")])
def test_the_threads_of_a_process_do_not_spin_for_long_unless_the_user_wants_it(monkeypatch, own, expected):
    """The environment of this process does not change."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", own)
    assert results(("variable", "GOMP_SPINCOUNT"), ECHO) == [expected, 1]
    assert os.environ.get("GOMP_SPINCOUNT") == own


def test_processes_that_are_closed_during_their_work_are_not_replaced(caplog):
    """As after a second Ctrl-C."""
    pool = WorkerPool(PREPARE, 1)
    tasks = [ECHO, Action("echo", 2)]

    def remote(process, task):
        if task is tasks[1]:
            pool.close()
        return process.call(task)

    with pytest.raises(WorkerEndedError):
        list(pool.map(tasks, remote, local))
    assert not caplog.text


@pytest.fixture
def stopped() -> Iterator[tuple[WorkerPool, int]]:
    """A pool of one process, which is stopped, and the process."""
    with closing(WorkerPool(PREPARE, 1)) as pool:
        [pid] = calls(pool, Action("pid", None))
        os.kill(pid, signal.SIGSTOP)
        yield pool, pid


def calls(pool: WorkerPool, *tasks: Action) -> Iterator[Any]:
    return (result for _, result in pool.map(tasks, WorkerProcess.call, local))


def test_45_a_stopped_process_is_reported_and_its_work_continues(stopped, monkeypatch, caplog):
    pool, pid = stopped
    monkeypatch.setattr("mtrain.processes.pool.SILENCE", 0.5)

    def resume() -> None:
        while not caplog.messages:
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)

    with ThreadPoolExecutor(1) as other:
        resumed = other.submit(resume)
        # A process that computes for longer than SILENCE is not reported.
        assert list(calls(pool, ECHO, Action("compute", 0.6))) == [1, 0.6]
        resumed.result()
    [message] = caplog.messages
    found = rf"the worker process of {WORKER} \(process {pid}\) has not answered or computed for [01] s"
    assert re.match(found, message)


def test_45_nothing_is_said_of_a_process_whose_computing_time_is_unknown(monkeypatch, caplog):
    """As on systems other than Linux; here, one that has ended."""
    monkeypatch.setattr("mtrain.processes.pool.SILENCE", 0.02)
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
            list(calls(pool, ECHO))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not Path(f"/proc/{pid}").exists()


def test_45_work_that_is_cancelled_does_not_wait_for_a_stopped_process(stopped):
    pool, pid = stopped

    def check() -> None:
        raise CancelledError

    with pytest.raises(CancelledError):
        list(pool.map([ECHO], WorkerProcess.call, local, check))
    assert not Path(f"/proc/{pid}").exists()


def test_an_error_of_the_user_is_raised_here():
    with pytest.raises(DataError, match="refused: line 3"):
        results(("refuse", "line 3"))


def test_a_bug_is_raised_here_with_the_traceback_of_the_process():
    with pytest.raises(RuntimeError, match="integer division or modulo by zero") as raised:
        results(("divide", 0))
    assert 'tests/support/worker.py", line' in raised.value.__notes__[0]


def test_an_error_before_the_first_task_is_not_hidden(tmp_path: Path):
    with pytest.raises(RuntimeError, match="No such file or directory"):
        results(ECHO, prepare=partial(prepare, str(tmp_path / "missing")))


def test_a_process_that_is_killed_is_replaced(tmp_path: Path, caplog):
    tasks = [("echo", 0), ("end once", str(tmp_path / "file")), ("echo", 2)]
    assert results(*tasks, workers=3) == [0, str(tmp_path / "file"), 2]
    assert caplog.messages == [KILLED + REPLACED]


@pytest.mark.parametrize("action", ["be killed", "be killed while answering"])
def test_the_main_process_does_the_work_of_a_process_that_is_killed_again(action: str, caplog):
    assert results((action, "task"), ECHO) == ["local task", 1]
    assert caplog.messages == [KILLED + REPLACED, KILLED + ABANDONED]


def test_the_result_of_a_call_that_was_interrupted_is_not_the_one_of_the_next():
    """A handler of a signal may raise any exception, for example after a time limit."""

    class OutOfTimeError(Exception):
        pass

    def raise_it(*_: object) -> None:
        raise OutOfTimeError

    process = WorkerProcess()
    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        process.prepare(PREPARE)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(OutOfTimeError):
            process.call(Action("compute", 0.5))
        with pytest.raises(WorkerEndedError):
            process.call(ECHO)
    finally:
        signal.signal(signal.SIGALRM, before)
        process.kill()


def test_a_signal_that_a_batch_system_sends_to_all_processes_does_not_end_the_workers():
    def send(process: WorkerProcess, task: Action) -> Any:
        for number in STOP_SIGNALS:
            process.process.send_signal(number)
        return process.call(task)

    with closing(WorkerPool(PREPARE, 1)) as pool:
        assert list(pool.map([ECHO], send, local)) == [(ECHO, 1)]


def test_the_exit_code_of_a_process_is_reported(caplog):
    assert results(("exit", 3)) == ["local 3"]
    assert caplog.messages[0] == f"a worker process ended with exit code 3; {REPLACED}"
