"""CPUs and memory that a process may use, and where the numbers come from."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import storm_dagster
from storm_dagster.host.capacity import Capacity, memory_problems
from storm_dagster.host.machine_size import MACHINE, Size, cpus, memory_bytes, whole_cpus
from storm_dagster.model.conf import default_conf

MIB = 2**20
V2 = "30 24 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 30 0:28 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 30 0:29 {top} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
)
LARGE = 1 << 62
"""What version 1 shows without a limit is about as large."""


def machine(root: Path, mounts: str, own: str, files: dict[str, str]) -> Path:
    """Files of a kernel below ``root``: mounted cgroups, the own ones, and limits by path."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(
        "22 1 0:21 / / rw - overlay overlay rw\n" + mounts, encoding="utf-8"
    )
    (root / "proc/self/cgroup").write_text(own, encoding="utf-8")
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    return root


def test_the_lowest_limit_of_a_parent_counts(tmp_path: Path) -> None:
    own = "0::/pods.slice/pod1/main\n"
    files = {
        "pods.slice/pod1/main/cpu.max": "max 100000",
        "pods.slice/pod1/cpu.max": "50000 100000",
        "pods.slice/cpu.max": "150000 100000",
        "pods.slice/pod1/main/memory.max": str(512 * MIB),
        "pods.slice/pod1/memory.max": str(300 * MIB),
        "pods.slice/memory.max": "max",
    }
    root = machine(tmp_path, V2.format(top="/"), own, files)
    assert cpus(root) == Size(0.5, "/sys/fs/cgroup/pods.slice/pod1/cpu.max")
    assert whole_cpus(root) == 1
    assert memory_bytes(root) == Size(300 * MIB, "/sys/fs/cgroup/pods.slice/pod1/memory.max")


def test_a_container_sees_its_own_cgroup_at_the_top(tmp_path: Path) -> None:
    files = {"cpu.max": "25000 100000", "memory.max": str(64 * MIB)}
    root = machine(tmp_path, V2.format(top="/"), "0::/\n", files)
    assert cpus(root) == Size(0.25, "/sys/fs/cgroup/cpu.max")
    assert memory_bytes(root).amount == 64 * MIB


@pytest.mark.parametrize("path", ["/../other/exec", "/other"])
def test_a_process_that_entered_a_container_has_its_limit(tmp_path: Path, path: str) -> None:
    files = {"memory.max": str(64 * MIB)}
    root = machine(tmp_path, V2.format(top="/docker/abc"), f"0::{path}\n", files)
    assert memory_bytes(root).amount == 64 * MIB


def test_limits_of_version_1_are_read_with_their_parents(tmp_path: Path) -> None:
    own = "5:cpu,cpuacct:/docker/abc/inner\n4:memory:/docker/abc/inner (deleted)\n0::/\n"
    files = {
        "cpu,cpuacct/inner/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/inner/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "20000",
        "cpu,cpuacct/cpu.cfs_period_us": "50000",
        # The folder of a removed cgroup is gone, its parents are not.
        "memory/memory.limit_in_bytes": str(96 * MIB),
    }
    root = machine(tmp_path, V1.format(top="/docker/abc") + V2.format(top="/"), own, files)
    assert cpus(root) == Size(0.4, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us")
    assert memory_bytes(root) == Size(96 * MIB, "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": str(LARGE),
    }
    own = "5:cpu,cpuacct:/\n4:memory:/\n"
    root = machine(tmp_path, V1.format(top="/"), own, files)
    assert cpus(root).amount == len(os.sched_getaffinity(0))
    memory = memory_bytes(root)
    assert memory.source == MACHINE and memory.amount > 64 * MIB
    assert not cpus(root).problem and not memory.problem and not memory.is_limited


def test_a_negative_memory_limit_is_none(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "-1"}
    memory = memory_bytes(machine(tmp_path, V1.format(top="/"), "4:memory:/\n", files))
    assert memory.source == MACHINE and memory.amount > 64 * MIB


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "empty"), ("fast 100000", "invalid literal"), ("100000 0", "a period of 0 us")],
)
def test_an_unreadable_limit_is_named_and_the_others_count(
    tmp_path: Path, text: str, reason: str
) -> None:
    files = {"a/cpu.max": "50000 100000", "a/b/cpu.max": text, "a/b/memory.max": text}
    root = machine(tmp_path, V2.format(top="/"), "0::/a/b\n", files)
    size = cpus(root)
    assert (size.amount, size.source) == (0.5, "/sys/fs/cgroup/a/cpu.max")
    assert "/sys/fs/cgroup/a/b/cpu.max" in size.problem and reason in size.problem
    assert "\n" not in size.problem
    memory = memory_bytes(root)
    assert "memory.max" in memory.problem and memory.source == MACHINE


def test_a_machine_without_readable_cgroups_counts_as_a_whole(tmp_path: Path) -> None:
    size = memory_bytes(tmp_path)
    assert size.source == MACHINE and size.amount > 0
    assert "mountinfo" in size.problem and "the machine counts" in size.problem


@pytest.mark.parametrize("line", ["x - cgroup2 y z\n", "30 24 0:26 / /sys - cgroup2\n"])
def test_a_list_of_mounts_of_an_unknown_form_is_a_problem(tmp_path: Path, line: str) -> None:
    size = cpus(machine(tmp_path, line, "0::/\n", {}))
    assert size.source in (MACHINE, "CPU affinity") and "unknown form" in size.problem


# -- a real kernel ---------------------------------------------------------------------------------

_PROGRAM = """
import dataclasses, json, os, sys
from storm_dagster.host.machine_size import cpus, memory_bytes, whole_cpus

for folder in sys.argv[1:]:
    with open(f"{folder}/cgroup.procs", "w") as members:
        members.write("0")
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
sizes = {"cpus": cpus(), "memory": memory_bytes()}
seen = {name: dataclasses.astuple(size) for name, size in sizes.items()}
print(json.dumps({**seen, "whole": whole_cpus()}))
"""


def run_limited(*folders: Path) -> dict[str, Any]:
    """Sizes in a process of one CPU, in the cgroups of these folders."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *map(str, folders)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_the_affinity_of_a_process_limits_its_cpus() -> None:
    seen = run_limited()
    assert seen["cpus"][0] <= 1 and seen["whole"] == 1
    if len(os.sched_getaffinity(0)) > 1 and seen["cpus"][0] == 1:
        assert seen["cpus"][1] == "CPU affinity"


@pytest.fixture
def own_cgroups() -> Iterator[tuple[Path, Path]]:
    """A cgroup of version 1 with half a CPU, and a child of one with 256 MiB; real ones."""
    made: list[Path] = []
    try:
        try:
            for controller in ("cpu", "memory"):
                parent = Path(f"/sys/fs/cgroup/{controller}/storm-sizes-{os.getpid()}")
                for folder in (parent, parent / "child"):
                    folder.mkdir()
                    made.append(folder)
            (made[1] / "cpu.cfs_period_us").write_text("100000")
            (made[1] / "cpu.cfs_quota_us").write_text("50000")
            (made[2] / "memory.limit_in_bytes").write_text(str(256 * MIB))
        except OSError as error:
            pytest.skip(f"no cgroup of version 1 can be made here: {error}")
        yield made[1], made[3]
    finally:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()


def test_real_cgroups_limit_a_process(own_cgroups: tuple[Path, Path]) -> None:
    cpu, memory = own_cgroups
    seen = run_limited(cpu, memory)
    assert seen["cpus"] == [0.5, f"{cpu}/cpu.cfs_quota_us", ""]
    assert seen["memory"] == [256 * MIB, f"{memory.parent}/memory.limit_in_bytes", ""]


def test_no_other_module_counts_the_machine() -> None:
    counters = re.compile(r"cpu_count|sched_getaffinity|SC_NPROCESSORS|SC_PHYS_PAGES|/proc/cpuinfo")
    package = Path(storm_dagster.__file__).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if counters.search(path.read_text(encoding="utf-8"))
    }
    assert users == {"host/machine_size.py"}


# -- what a supervisor offers ----------------------------------------------------------------------


def test_a_supervisor_offers_what_it_finds_or_its_conf() -> None:
    conf = default_conf()
    found = Capacity.of(conf)
    assert found.cpu == round(cpus().amount * 100) and found.cpu_source == cpus().source
    assert found.memory_mb == int(memory_bytes().amount / MIB)
    assert found.memory_source == memory_bytes().source
    conf.update({"supervisor.cpu.capacity": 150, "supervisor.memory.capacity.mb": 700})
    given = Capacity.of(conf)
    assert (given.cpu, given.cpu_source) == (150, "supervisor.cpu.capacity")
    assert (given.memory_mb, given.memory_source) == (700, "supervisor.memory.capacity.mb")
    assert "150 % of a core (supervisor.cpu.capacity)" in given.text


def test_a_limit_below_what_a_slot_needs_has_one_line() -> None:
    conf = {**default_conf(), "worker.memory.size": 512 * MIB}
    file = "/sys/fs/cgroup/memory.max"
    (problem,) = memory_problems(conf, Size(256 * MIB, file))
    assert "256 MiB" in problem and "512 MiB" in problem and file in problem
    assert "lower worker.memory.size" in problem and "\n" not in problem
    # The size is a label that workers need not fill, unless it is enforced.
    assert memory_problems(conf, Size(1024 * MIB, file)) == []
    conf["supervisor.worker.memory.enforce"] = True
    (problem,) = memory_problems(conf, Size(1024 * MIB, file))
    assert "4 slots need, 2048 MiB" in problem and "supervisor.slots.ports" in problem
    assert memory_problems(conf, Size(2048 * MIB, file)) == []
    # A machine without a limit ends no process for its group.
    assert memory_problems(conf, Size(256 * MIB, MACHINE)) == []
