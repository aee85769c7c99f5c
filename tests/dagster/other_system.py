"""``other_system.py HOME FILE``: what a laptop without Linux does with the cluster of HOME; the
outcome as JSON.

What only Linux has is taken away before anything is imported: modules, functions, clocks and
``/proc``. psutil alone keeps them: elsewhere it has other means, which this machine has not.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

assert psutil.LINUX
for name in ("fcntl", "pwd", "grp", "resource"):
    sys.modules[name] = None  # type: ignore[assignment]
for owner, names in {
    os: (
        "pidfd_open",
        "pipe2",
        "sched_getaffinity",
        "memfd_create",
        "eventfd",
        "splice",
        "copy_file_range",
    ),
    signal: ("pidfd_send_signal",),
    socket: ("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
    select: ("epoll",),
    time: ("CLOCK_BOOTTIME",),
}.items():
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)


def refuse(owner: Any, name: str) -> None:
    """Make a function of ``owner`` blind to ``/proc``."""
    real = getattr(owner, name)

    def blind(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, int) and os.fsdecode(path).startswith("/proc"):
            frame, psutil_asks = sys._getframe(1), False
            for _ in range(4):
                psutil_asks = psutil_asks or f"{os.sep}psutil{os.sep}" in frame.f_code.co_filename
                frame = frame.f_back or frame
            if not psutil_asks:
                raise FileNotFoundError(2, "this system has no /proc", os.fsdecode(path))
        return real(path, *args, **kwargs)

    setattr(owner, name, blind)


for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"):
    refuse(os, name)
refuse(builtins, "open")
refuse(io, "open")

sys.path.pop(0)
home, target = Path(sys.argv[1]), sys.argv[2]


def ticks() -> dict[str, tuple[str, str]]:
    """Every sensor and schedule of the definitions, of a declared topology, and of a user -> type
    and text of its tick.
    """
    import dagster as dg
    from dagster.components.testing import create_defs_folder_sandbox

    from storm_dagster import (
        StormTopologyComponent,
        build_alert_sensor,
        build_storm_defs,
    )

    found: dict[str, tuple[str, str]] = {}
    alerts = build_alert_sensor(print)
    users = dg.Definitions(sensors=[alerts])
    declared = {"name": "declared", "target": target, "home": str(home)}
    with create_defs_folder_sandbox() as sandbox, dg.instance_for_test() as instance:
        path = sandbox.scaffold_component(
            component_cls=StormTopologyComponent,
            defs_yaml_contents={
                "type": "storm_dagster.StormTopologyComponent",
                "attributes": declared,
            },
        )
        with sandbox.load_component_and_build_defs(defs_path=path) as (_, own):
            for defs in (
                dg.Definitions.merge(build_storm_defs(home=str(home), tick_secs=1.0), users),
                own,
            ):
                dg.Definitions.validate_loadable(defs)
                resources = dict(defs.resources or {})
                repository = defs.get_repository_def()
                for sensor in repository.sensor_defs:
                    with dg.build_sensor_context(
                        instance=instance, definitions=defs, resources=resources
                    ) as context:
                        data = sensor.evaluate_tick(context)
                        found[sensor.name] = (type(data).__name__, data.skip_message or "")
                for schedule in repository.schedule_defs:
                    with dg.build_schedule_context(
                        instance=instance,
                        resources=resources,
                        repository_def=repository,
                        scheduled_execution_time=datetime.now(timezone.utc),
                    ) as context:
                        data = schedule.evaluate_tick(context)
                        found[schedule.name] = (type(data).__name__, data.skip_message or "")
    return found


def call(*argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of the command line."""
    from storm_dagster.cli import main

    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr, sys.argv = io.StringIO(), io.StringIO(), ["storm-dagster", *argv]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0), sys.stdout.getvalue(), sys.stderr.getvalue()
    finally:
        sys.stdout, sys.stderr = out, err
    raise AssertionError("the command line always exits")


def harness() -> int:
    """Tuples that a topology acked in the harness."""
    from storm_dagster.testing import run_topology

    sys.path.insert(0, str(Path(target).parent))
    topology = importlib.import_module(Path(target).stem).Steady
    return len(run_topology(topology, {"numbers": [[1], [2], [3]]}).acked["numbers"])


def refusals() -> dict[str, tuple[int, str]]:
    """Exit code and message of each daemon on another system."""
    messages, sys.platform = {}, "darwin"
    try:
        for verb in ("daemon supervisor", "dev"):
            name = verb.rpartition(" ")[2]
            code, _, error = call(*verb.split(), "--home", str(home / name))
            messages[name] = (code, error.strip().splitlines()[-1])
        from storm_dagster.model.errors import StormDagsterError
        from storm_dagster.worker.runtime.process import run_worker

        try:
            run_worker(home / "SPEC.json")
        except StormDagsterError as error:
            messages["worker"] = (error.exit_code, f"{type(error).__name__}: {error.message}")
    finally:
        sys.platform = "linux"
    return messages


def identity() -> list[bool]:
    """This process is known by its pid and start, and no other is."""
    from storm_dagster.host.clock import boot_clock, boot_id
    from storm_dagster.host.processes import RunFile, processes, signal_exactly, start_ticks

    record = RunFile.write(home, "test", "other")
    before = boot_clock()
    return [
        record.alive(),
        not record.model_copy(update={"start_ticks": record.start_ticks - 1}).alive(),
        not signal_exactly(os.getpid(), record.start_ticks - 1, signal.SIGKILL),
        record.signal(0),
        start_ticks(1 << 22) is None,
        os.getpid() in {process.pid for process in processes()},
        bool(boot_id()) and boot_id() == record.boot_id,
        boot_clock() >= before,
    ]


code, listed, error = call("list", "--json", "--home", str(home))
print(
    json.dumps(
        {
            "ticks": ticks(),
            "list": [code, json.loads(listed or "null"), error],
            "harness": harness(),
            "refusals": refusals(),
            "identity": identity(),
        }
    )
)
