"""scripts/simulate_cuda runs code on a simulated CUDA device, and finds what would be wrong on a GPU."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from tests.support.paths import ROOT

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or torch.version.cuda is not None, reason="needs g++ and PyTorch without CUDA"
)

DEVICE = """
import sys
import torch

def error(function):
    try:
        function()
    except RuntimeError as error:
        return str(error).splitlines()[0]

x = torch.ones(3, 4, device="cuda")
torch.cuda.set_sync_debug_mode("error")
with torch.autocast("cuda", torch.bfloat16):
    print(sys.argv[1:], (x @ x.T).dtype, torch.cuda.get_device_capability())
print(error(lambda: x.sum().item()))
print(error(lambda: x[torch.tensor([0, 2])]))
print(error(lambda: x + torch.ones(4)))
print(error(lambda: torch.ones(4).to("cuda")))
print(error(lambda: torch.ones(4).pin_memory().to("cuda", non_blocking=True)))
torch.cuda.set_sync_debug_mode("default")
print(x.nonzero().tolist()[-1], torch.sort(x.cumsum(1), descending=True).values[0].tolist())
"""
DEVICE_SAYS = """\
['a', '--b'] torch.bfloat16 (9, 0)
called a synchronizing CUDA operation: a value is read
called a synchronizing CUDA operation: a copy to the device
Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!
called a synchronizing CUDA operation: a copy to the device
None
[2, 3] [4.0, 3.0, 2.0, 1.0]
"""
# A training step that waits, and encoder output on the wrong device.
FAULTS = """
import sys
from simulate_cuda import counts
from mtrain.model.transformer import Transformer
from mtrain.training.step.learner import Learner

{}
counts.TRAINING = counts.TRAINING[:1]
counts.count_decoding = lambda *_: counts.Counts(0, 0, 0, counts.Counter())
sys.exit(counts.main())
"""
READS_A_VALUE = """
step = Learner.step
Learner.step = lambda *arguments: print(end=f"{step(*arguments).values[0].item():.0}"[:0])
"""
MEMORY_ON_HOST = """
decode = Transformer.decode_tokens
Transformer.decode_tokens = lambda self, x, of, memory, *more: decode(self, x, of, memory.cpu(), *more)
"""


def simulate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "simulate_cuda"), *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["run", "-m", "mtrain"], ["counts"], ["check"], ["check", "tests"]])
def test_without_a_compiler_it_is_skipped(tmp_path, arguments):
    done = simulate(*arguments, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 77 and not done.stdout
    assert re.fullmatch(r"simulate_cuda: skipped: there is no (g\+\+|CPU build of PyTorch .*)\n", done.stderr)


@needs_compiler
def test_without_a_compiler_that_works_it_is_skipped(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho error: old >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = simulate("counts", PATH=f"{tmp_path}:{os.environ['PATH']}", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 77 and not done.stdout
    assert done.stderr == "error: old\nsimulate_cuda: skipped: g++ failed, see above\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["chekc"], "usage: "), (["run"], "usage: "), (["check", "test"], "unknown part test; ")],
)
def test_wrong_arguments_are_an_error(arguments, error):
    done = simulate(*arguments)
    assert done.returncode == 2 and done.stderr.startswith(error)


@pytest.mark.slow
@needs_compiler
def test_a_script_runs_on_the_device(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(DEVICE)
    done = simulate("run", str(file), "a", "--b")
    assert done.stdout == DEVICE_SAYS, done.stderr


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("fault", "problems"),
    [
        (READS_A_VALUE, r"training, .*: DataDependentOutputException: "),
        (MEMORY_ON_HOST, r"training, .*: RuntimeError: "),
    ],
)
def test_faults_are_problems(tmp_path, fault, problems):
    file = tmp_path / "script.py"
    file.write_text(FAULTS.format(fault))
    done = simulate("run", str(file))
    assert done.returncode == 1, done.stderr
    assert re.search(f"^problem: {problems}", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
@needs_compiler
def test_the_complete_check_passes():
    done = simulate("check")
    assert done.returncode == 0, done.stdout
    ended = dict(re.findall(r"^(.+): (exit 0), \d+ s$", done.stdout, re.MULTILINE))
    translations = ["demo", "translate, greedy", "translate, beam 5", "score"]
    tests, counts = ["tests", "tests, slow"], ["counts", "counts, others"]
    assert sorted(ended) == sorted([*tests, *translations, "resume", *counts])
    assert (
        len(re.findall(r"^training, (?:base|big), \S+ \S+ tokens .* 1 +0$", done.stdout, re.MULTILINE)) == 8
    )
    assert len(re.findall(r"^decoding, 1.1 layers, beam [15].* 0\.2\d$", done.stdout, re.MULTILINE)) == 4
