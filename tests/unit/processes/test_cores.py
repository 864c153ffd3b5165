"""The cores that a process may use, and the variables that OpenMP reads."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtrain.processes.cores import count_cores, cpu_limit, openmp_settings, thread_seconds

V1, V2 = "4:cpu,cpuacct:/docker/job\n3:memory:/other\n0::/\n", "0::/user.slice/job\n"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    """A machine whose eight logical CPUs are four physical cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def machine(root: Path, groups: str, quotas: dict[str, str]) -> Path:
    """A root folder with some quotas in `sys/fs/cgroup`, for a process of these groups."""
    write(root, {f"sys/fs/cgroup/{name}": text for name, text in quotas.items()})
    pairs = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}"
        for n in range(8)
    }
    write(root, {"proc/self/cgroup": groups, **pairs})
    return root


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("groups", "quotas", "limit", "cores"),
    [
        (V2, {"user.slice/job/cpu.max": "150000 100000\n"}, 1.5, 2),
        (V2, {"user.slice/job/cpu.max": "max 100000\n", "user.slice/cpu.max": "25000 50000\n"}, 0.5, 1),
        (V2, {"user.slice/job/cpu.max": "300000 100000\n", "user.slice/cpu.max": "400000 100000\n"}, 3, 3),
        (V2, {"user.slice/job/cpu.max": "1600000 100000\n"}, 8, 8),  # more than the affinity
        (V2, {"user.slice/other/cpu.max": "100000 100000\n"}, 8, 8),
        (V2, {"user.slice/job/cpu.max": "damaged\n"}, 8, 8),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2, 2),  # a container, which sees its group as the root
        ("0::/docker/job\n", {"cpu.max": "200000 100000\n"}, 2, 2),  # or as the host does
        ("0::/../outside\n", {"user.slice/cpu.max": "100000 100000\n"}, 8, 8),
        (V1, v1("cpu,cpuacct/docker/job", 250_000), 2.5, 3),
        (V1, v1("cpu/docker/job", -1) | v1("cpu/docker", 100_000, 50_000), 2, 2),
        (V1, v1("cpu", 100_000), 1, 1),
        (V1, v1("memory/other", 100_000), 8, 8),
        ("1:cpu:/\n0::/job\n", {"unified/job/cpu.max": "400000 100000\n"}, 4, 4),
        ("", {}, 8, 8),
        ("unknown\n", {}, 8, 8),
    ],
)
def test_the_smallest_quota_of_the_groups_of_a_process_counts(tmp_path, groups, quotas, limit, cores):
    root = machine(tmp_path, groups, quotas)
    assert (cpu_limit(root), count_cores(root)) == (limit, cores)


def test_without_proc_and_affinity_all_cores_count(tmp_path, monkeypatch):
    """As on macOS and Windows."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert count_cores(tmp_path) == cpu_limit(tmp_path) == os.cpu_count()
    assert openmp_settings({}, tmp_path) == {"GOMP_SPINCOUNT": "1000"}
    assert thread_seconds(tmp_path) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("environment", "quota", "settings"),
    [
        ({}, None, {"GOMP_SPINCOUNT": "1000"}),
        ({}, 2, {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "2"}),
        ({}, 6, {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "4"}),  # one for each physical core
        ({"OMP_NUM_THREADS": "8", "GOMP_SPINCOUNT": "5"}, 2, {}),
        ({"OMP_WAIT_POLICY": "active"}, 2, {"OMP_NUM_THREADS": "2"}),
    ],
)
def test_openmp_follows_the_quota_unless_the_user_has_set_it_up(tmp_path, environment, quota, settings):
    quotas = {} if quota is None else {"user.slice/job/cpu.max": f"{quota}00000 100000\n"}
    assert openmp_settings(environment, machine(tmp_path, V2, quotas)) == settings


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the scheduler keeps no statistics")
def test_the_seconds_of_threads_are_counted():
    before, cpu = thread_seconds(), time.process_time()
    while time.process_time() - cpu < 0.05:
        pass
    assert thread_seconds().ran - before.ran == pytest.approx(0.05, abs=0.04)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from mtrain.cli import main\ntry:\n    main(['--version'])\nexcept SystemExit:\n    pass", "1000"),
        pytest.param("from mtrain import Translator", "None", marks=pytest.mark.slow),
    ],
)
def test_the_commands_set_up_openmp_and_the_library_does_not(code, expected):
    names = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
    environment = {name: value for name, value in os.environ.items() if name not in names}
    program = f"{code}\nimport os\nprint(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == expected, done.stderr
