"""How this process was started: alone, or by torchrun as one of several processes of a command ("ranks")."""

import os
from typing import NamedTuple

from mtrain.errors import DistributedError, UsageError

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Launch(NamedTuple):
    """The place of this process among the ranks of its command."""

    rank: int = 0
    size: int = 1  # number of ranks
    local_rank: int = 0  # among the ranks on this machine
    local_size: int = 1
    restarts: int = 0  # how often torchrun has started the ranks again after a failure


def read_launch() -> Launch:
    """Read the environment variables that torchrun sets. Without them, this process is the only rank.

    Raises UsageError if one of them is not an integer.
    """
    if not os.environ.keys() >= set(_REQUIRED):
        return Launch()
    return Launch(
        rank=_number("RANK"),
        size=_number("WORLD_SIZE"),
        local_rank=_number("LOCAL_RANK"),
        local_size=_number("LOCAL_WORLD_SIZE", "1"),
        restarts=_number("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(name: str, default: str = "") -> int:
    """The value of an environment variable."""
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise UsageError(f"{name}: {value!r} in the environment is not a number; use torchrun")
    return int(value)


def require_repeatable(uses_streams: bool, cure: str) -> None:
    """Raise UsageError if torchrun has restarted this command after the loss of a rank, and the command reads
    or writes streams: what was read from a pipe, or written to it, cannot be repeated."""
    if uses_streams and read_launch().restarts:
        found = "its input or output is stdin, stdout or a pipe, which cannot be read or written again"
        raise UsageError(f"torchrun has restarted this command, but {found}; {cure}")


def require_complete_launch() -> None:
    """Raise DistributedError if the environment has some of torchrun's variables, but not all of them, and
    there are several processes. Systems such as Kubeflow also set some of them for a single process."""
    if os.environ.get("WORLD_SIZE") == "1":
        return
    found = [name for name in _REQUIRED if name in os.environ]
    missing = ", ".join(name for name in _REQUIRED if name not in os.environ)
    if found and missing:
        raise DistributedError(
            f"{', '.join(found)} set in the environment, but not {missing}; start the processes with "
            f"torchrun, or unset {', '.join(found)} to run alone"
        )


def require_torchrun() -> None:
    """Raise DistributedError if Slurm's `srun`, or the `mpirun` of Open MPI, MPICH or Intel MPI, has started
    several processes without torchrun. They would all use the same run folder."""
    cures = {"srun": "--ntasks-per-node 1", "mpirun": "-npernode 1 or -ppn 1"}
    counts = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
    for variable, program in counts.items():
        if (tasks := os.environ.get(variable, "")) not in ("", "1") and "RANK" not in os.environ:
            problem = f"{program} has started {tasks} processes that do not know of each other"
            raise DistributedError(
                f"{problem}; start one torchrun on each node with {program} {cures[program]}, "
                f"or unset {variable} if each has a run folder of its own"
            )
