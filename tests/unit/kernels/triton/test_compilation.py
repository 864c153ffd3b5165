"""All kernels compile for the GPUs that they are used on. No GPU is needed."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 86, 90])
def test_every_kernel_compiles_and_fits_in_shared_memory(capability: int) -> None:
    # In a process of its own, because this one has imported the kernels for the interpreter.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.support.compile_kernels", str(capability)]
    subprocess.run(command, cwd=ROOT, check=True, env=environment, timeout=1800)
