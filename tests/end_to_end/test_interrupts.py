"""Ctrl-C while packages are imported, and while a progress bar is shown: one line, exit code 130."""

import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest

from mtrain import progress_bar
from tests.support.cli import start_forked

AT_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from mtrain.cli import main
main({arguments!r})
"""
IN_FINALIZER = """
import os, signal, time

class Interrupt:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

def run(arguments):
    Interrupt()
    time.sleep(60)

from mtrain.cli import app, main
app.run = run
main([])
"""
AT_START = "from mtrain.cli import main; print('ready', flush=True); main({arguments!r})"


# A shell starts background processes, of which this test may be one, with SIGINT ignored.
WITH_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def start(code: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", WITH_SIGINT + code], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("command", "modules"),
    [
        ("--help", ["mtrain.cli.app", "typer", "mtrain.errors"]),
        ("fit", ["torch.nn"]),
        pytest.param("fit", ["tqdm", "yaml"], marks=pytest.mark.slow),
        pytest.param(
            "translate", ["sentencepiece", "torch", "mtrain.decoding.translate"], marks=pytest.mark.slow
        ),
        ("evaluate", ["sacrebleu"]),
    ],
)
def test_an_interrupt_during_an_import_ends_the_command_at_once(command, modules, run_dir, config_file):
    arguments = {"--help": ["--help"], "fit": ["fit", str(config_file)]}.get(command, [command, str(run_dir)])
    running = [start(AT_IMPORT.format(module=module, arguments=arguments)) for module in modules]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in running]
    assert ended == [("", "stopped by SIGINT\n", 130)] * len(modules)


def test_an_interrupt_in_a_finalizer_is_not_lost():
    process = start(IN_FINALIZER)
    assert (*process.communicate(timeout=120), process.returncode) == ("", "stopped by SIGINT\n", 130)


@pytest.mark.parametrize("command", ["translate", "score"])
def test_an_interrupt_clears_the_progress_bar(command, run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(progress_bar, "DELAY", 1e-9)
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "long").write_text("It rains.\n" * 20_000)
    arguments = ["-i", tmp_path / "long", *["--target", tmp_path / "long"] * (command == "score")]
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    nothing = os.open(os.devnull, os.O_RDWR)
    job = [command, run_dir, *arguments, "--device", "cpu"]
    child = start_forked(*job, streams=[nothing, nothing, terminal])
    for descriptor in (terminal, nothing):
        os.close(descriptor)
    shown = b""
    try:
        while b" left" not in shown:
            shown += os.read(reader, 4096)
        os.kill(child, signal.SIGINT)
        while True:
            shown += os.read(reader, 4096)
    except OSError:  # the command has ended
        os.close(reader)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert shown.endswith(b"\r\x1b[Jstopped by SIGINT\r\n"), shown[-200:]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "translate", "evaluate"])
def test_an_interrupt_at_any_time_leaves_no_traceback(command, run_dir, config_file, tmp_path):
    for number in range(1, 60, 3):
        run = ["--run-dir", str(tmp_path / str(number)), "--set", "training.max_steps=100000"]
        arguments = ["fit", str(config_file), *run] if command == "fit" else [command, str(run_dir)]
        process = start(AT_START.format(arguments=[*arguments, "--device", "cpu"]))
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.05 * number)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert "Traceback" not in err and "Exception ignored" not in err, err
        # The command may have finished, and Python's own exit dies of the signal.
        assert process.returncode in (130, 0, -signal.SIGINT), err
        assert process.returncode != 130 or err.splitlines()[-1].startswith("stopped by SIGINT")
