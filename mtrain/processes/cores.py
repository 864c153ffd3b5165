"""The cores that this process may use, and the time that its threads wait for one. Imports no library."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")  # of `proc` and `sys`, which only Linux has; tests have others


def count_cores(root: Path = ROOT) -> int:
    """The number of cores that this process may use: `cpu_limit`, rounded up."""
    return max(1, math.ceil(cpu_limit(root)))


def cpu_limit(root: Path = ROOT) -> float:
    """The cores that this process may use: the cores of its affinity, or fewer if a control group limits its
    CPU time, as containers and batch systems do.

    Sources: cpu.max in the kernel's admin-guide/cgroup-v2; scheduler/sched-bwc for version 1.
    """
    limits = [float(len(_affinity()))]
    with suppress(OSError, ValueError):  # not Linux, or an unknown format
        limits += [*_quotas(root)]
    return min(limits)


def _affinity() -> set[int]:
    """The numbers of the logical CPUs that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {*range(os.cpu_count() or 1)}


def _quotas(root: Path) -> Iterator[float]:
    for folder in control_groups(root, "cpu"):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # no such group, no file, or no quota: "max 100000"
                quota, period = map(int, " ".join((folder / file).read_text() for file in files).split())
                if min(quota, period) > 0:
                    yield quota / period


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the control group of this process for a controller, such as `cpu`, and of all groups
    above it, whose limits apply, too. They need not exist: in a container, the path may be the path on the
    host, of which only the top folder exists, the container's own group. Raises OSError if the system has no
    control groups, ValueError if their format is not known."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        # Only version 2 names no controllers; it is mounted in a subfolder if version 1 is also mounted.
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (controller, controllers) if controllers else ("", "unified"):
            top = root / "sys/fs/cgroup" / mount
            group = top / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def openmp_settings(environment: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """The variables that mtrain adds to the `environment` of its processes. OpenMP reads them when PyTorch is
    loaded.

    - GOMP_SPINCOUNT: a waiting thread occupies its core for this many rounds. The default takes milliseconds,
      in which other threads could use the core.
    - OMP_NUM_THREADS, if there is a quota, which PyTorch ignores: it uses a thread for each physical core of
      the affinity.
    """
    settings = {}
    if not environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        settings["GOMP_SPINCOUNT"] = "1000"
    if "OMP_NUM_THREADS" not in environment and cpu_limit(root) < len(_affinity()):
        settings["OMP_NUM_THREADS"] = str(min(count_cores(root), _count_physical_cores(root)))
    return settings


def _count_physical_cores(root: Path) -> int:
    """The physical cores that this process may run on, each of which may be several logical CPUs."""
    cpus, folder = _affinity(), root / "sys/devices/system/cpu"
    with suppress(OSError):
        return len({(folder / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in cpus})
    return len(cpus)


class ThreadSeconds(NamedTuple):
    """Seconds of all threads of this process since they started; zero if the system does not report them."""

    ran: float = 0.0
    waited: float = 0.0  # for a core that others occupied


def thread_seconds(root: Path = ROOT) -> ThreadSeconds:
    """The sums over all threads of this process, from the statistics of Linux' scheduler."""
    total = [0, 0]
    for file in (root / "proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # a thread that has just ended
            ran, waited, _ = map(int, file.read_text().split())
            total = [total[0] + ran, total[1] + waited]
    return ThreadSeconds(total[0] / 1e9, total[1] / 1e9)
