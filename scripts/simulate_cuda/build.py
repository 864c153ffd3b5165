"""Build the library of the device with g++, and load it."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

SKIPPED = 77  # the exit code of a skipped test for Automake, Meson and others
SOURCE = Path(__file__).with_name("device.cpp")
SOURCES = [SOURCE, *(SOURCE.with_name(name) for name in ("graphs.h", "memory.h"))]
OPTIONS = ["-std=c++20", "-O1", "-shared", "-fPIC"]


def load() -> ctypes.CDLL:
    """Build the library if necessary, and load it and what it needs of PyTorch.

    This has to be done before PyTorch is imported, which looks for CUDA only once.
    """
    assert "torch" not in sys.modules
    library = build()
    for path in _libraries(_torch()):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def build() -> Path:
    """The library, built if the cache does not have it for these sources and this version of PyTorch.

    Ends the process if there is no compiler, it fails, or PyTorch is of another kind.
    """
    torch = _torch()
    if (torch / "lib" / "libtorch_cuda.so").exists() or not all(map(Path.exists, _libraries(torch))):
        skip("there is no CPU build of PyTorch for Linux")
    key = hashlib.sha256(b"".join(path.read_bytes() for path in [*SOURCES, torch / "version.py"]))
    key.update(" ".join(OPTIONS).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtrain"
    library = cache / f"simulate_cuda-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = shutil.which("g++")
    if compiler is None:
        skip("there is no g++")
    cache.mkdir(parents=True, exist_ok=True)
    include = torch / "include"
    with TemporaryDirectory(dir=cache) as folder:  # another process may build it at the same time
        built = Path(folder) / library.name
        command = [compiler, *OPTIONS, f"-I{include}", f"-I{include}/torch/csrc/api/include"]
        if subprocess.run([*command, str(SOURCE), "-o", str(built)]).returncode:
            skip("g++ failed, see above")  # for instance, because this version of PyTorch has other headers
        built.replace(library)
    return library


def _torch() -> Path:
    """The folder of PyTorch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else Path()


def _libraries(torch: Path) -> list[Path]:
    return [torch / "lib" / name for name in ("libc10.so", "libtorch_cpu.so")]


def skip(reason: str) -> NoReturn:
    """End the process because the device cannot be simulated here."""
    print(f"simulate_cuda: skipped: {reason}", file=sys.stderr)
    sys.exit(SKIPPED)
