"""Ctrl-C in the first seconds of a command, while packages are imported: one line, exit code 130."""

import signal
import subprocess
import sys
import time

import pytest

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
        ("fit", ["tqdm", "yaml", "torch.nn"]),
        ("translate", ["sentencepiece", "torch", "mtrain.decoding.translate"]),
        ("evaluate", ["sacrebleu"]),
    ],
)
def test_an_interrupt_during_an_import_ends_the_command_at_once(command, modules, run_dir, config_file):
    arguments = {"--help": ["--help"], "fit": ["fit", str(config_file)]}.get(command, [command, str(run_dir)])
    running = [start(AT_IMPORT.format(module=module, arguments=arguments)) for module in modules]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in running]
    assert ended == [("", "stopped by SIGINT\n", 130)] * len(modules)


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
