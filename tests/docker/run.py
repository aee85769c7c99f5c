"""``make test-docker``: the containers of docker/compose.yaml, built, started, and put through
faults.

    python tests/docker/run.py            the full program: a topology that writes down every number, and every fault
    python tests/docker/run.py --short    up, a word count over real text, one host killed on the way, down
    python tests/docker/run.py --faults "supervisor killed,spark paused 25 s"        --list names them

Needs a Docker engine with Compose 2 and buildx. Everything that it starts is gone afterwards; logs
of a failed run are in build/docker/logs. Exit 1 with a failure, 2 without an engine.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import bad_input
import daemons
from containers import PROJECT, ROOT, Containers, Failure, containers, project_is_empty
from faults import DRAINS, all_faults, drain_supervisors
from monitoring import check_monitoring
from watcher import NAME, PROBE, Watcher, table

LOGS = ROOT / "build" / "docker" / "logs"
FILES, LIMIT, RATE = 60, 30_000, 200
BEGAN = time.monotonic()


def say(text: str) -> None:
    """One line with the time since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


def check(condition: object, otherwise: str) -> None:
    """:class:`Failure` unless the condition holds."""
    if not condition:
        raise Failure(otherwise)


def submit(made: Containers, *arguments: str) -> str:
    """Submit; again with the same token while Dagster is too slow, as on a busy machine."""
    token = secrets.token_hex(8)
    deadline = time.monotonic() + 400
    while True:
        try:
            return made.cli("submit", *arguments, "--token", token, timeout=600)
        except Failure as error:
            if time.monotonic() > deadline or "Unavailable" not in str(error):
                raise
            say(f"submitting again: {str(error).strip().splitlines()[-1][:300]}")
            time.sleep(10)


def counts(made: Containers) -> dict[str, Any]:
    """The word count's saved words against a count of the same lines in another process."""
    text = made.compose(
        "run", "--rm", "-T", "--no-deps", "--volume", f"{PROBE}:/probe:ro",
        "--volume", f"{PROJECT}_state:/var/lib/storm_state", "--entrypoint", "/opt/storm/bin/python",
        "cli", "/probe/counts.py", "wordcount", str(FILES), str(LIMIT),
    )  # fmt: skip
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


def show(made: Containers, name: str) -> dict[str, Any] | None:
    """``storm-dagster show NAME --json``; ``None`` while no nimbus answers."""
    text = made.exec("nimbus1", "storm-dagster", "show", name, "--json", check=False)
    try:
        return json.loads(text)
    except ValueError:
        return None


def wait_running(made: Containers, name: str, timeout: float, without: str = "") -> float:
    """Seconds until all tasks of the topology run, none of them on the host ``without``."""
    began = time.monotonic()
    document: dict[str, Any] | None = None
    while time.monotonic() - began < timeout:
        document = show(made, name)
        tasks = (document or {}).get("tasks", [])
        if tasks and all(task["status"] == "running" and task["host"] != without for task in tasks):
            return time.monotonic() - began
        time.sleep(1)
    raise Failure(f"not all tasks of {name} ran within {timeout:.0f} s: {document}")


def short(made: Containers) -> None:
    """Up, word count with an independent count, one host killed on the way."""
    text = submit(
        made, "wordcount.py", "--conf", "topology.workers=3", "--conf", "topology.message.timeout.secs=10",
        "--conf", f"wordcount.files={FILES}", "--conf", f"wordcount.limit={LIMIT}",
        "--conf", f"wordcount.lines.per.second={RATE}",
    )  # fmt: skip
    say(next((line for line in text.splitlines() if "ACTIVE" in line), text[-300:]).strip())
    document = show(made, "wordcount")
    check(document, "the topology cannot be shown")
    assert document is not None
    counting = {task["host"] for task in document["tasks"] if task["component"] == "count"}
    hosts = {worker["host"] for worker in document["workers"]}
    check(len(hosts) == 3, f"three workers run on {sorted(hosts)} instead of three hosts")
    before = counts(made)
    say(f"{before['done']} of {before['total']} lines are counted")
    check(before["done"] < before["total"], "all was counted before a host could be killed")
    drain_supervisors(made)
    tasks = (show(made, "wordcount") or {}).get("tasks", [])
    failed = sum(task["stats"]["failed"] for task in tasks if task.get("stats"))
    check(not failed, f"{failed} tuple trees failed during a rolling restart of the supervisors")
    say("each supervisor was restarted, after its tasks had moved")
    wait_running(made, "wordcount", 120)
    document = show(made, "wordcount") or document
    counting = {task["host"] for task in document["tasks"] if task["component"] == "count"}
    victim = sorted(counting)[0]
    made.docker("kill", made.name(victim))
    say(f"docker kill {victim}, where words are counted")
    say(
        f"all tasks run elsewhere after {wait_running(made, 'wordcount', 300, without=victim):.1f} s"
    )
    deadline = time.monotonic() + 240
    while (now := counts(made))["done"] < LIMIT:
        check(time.monotonic() < deadline, f"not everything was counted in time: {now}")
        time.sleep(2)
    check(not now["wrong"] and not now["twice"], f"words are counted wrongly: {now}")
    say(f"{now['words']} words: equal to the independent count")
    made.docker("start", made.name(victim))
    made.wait_healthy()
    bad_input.check_port(made, say)
    daemons.check_probes(made, say)
    daemons.check_sizes(made, say)
    made.exec("nimbus1", "storm-dagster", "doctor", "--invariants", timeout=90)
    made.exec("nimbus1", "storm-dagster", "doctor", timeout=90)
    say("all services are healthy, doctor finds nothing")


def full(made: Containers, names: list[str], rounds: int, sample: int) -> bool:
    """Every fault once, then samples; whether nothing was lost and all healed."""
    shutil.copy(Path(__file__).parent / "topologies" / "every_number.py", made.topologies)
    text = submit(made, "every_number.py", "--name", NAME, "--conf", "topology.workers=3")
    say(next((line for line in text.splitlines() if "ACTIVE" in line), text[-300:]).strip())
    watcher = Watcher(made)
    faults = all_faults(made, watcher)
    chosen = names or list(faults)
    more = [random.sample(list(faults), sample) for _ in range(rounds)]
    try:
        check(watcher.wait_well(120) is not None, f"the topology is not well: {watcher.last}")
        for name in [*chosen, *(name for part in more for name in part)]:
            row = watcher.run(name, faults[name])
            healed = "NOT healed" if row.healed is None else f"well after {row.healed:.0f} s"
            say(
                f"{name}: {healed}, {row.lost} lost, {row.repeated} repeated, {watcher.last['done']} in all"
            )
            if row.healed is None or row.lost:
                say(f"seen: {watcher.last}")
                made.logs(LOGS)
                check(watcher.wait_well(300) is not None, f"it stays so: {watcher.last}")
            if name == DRAINS:
                check(not row.repeated, f"{row.repeated} numbers are repeated by {name}")
            # Also what this topology does not need.
            made.wait_healthy()
        time.sleep(3)
        say(f"{watcher.last['done']} numbers, {watcher.last['missing']} lost")
        made.exec("nimbus1", "storm-dagster", "doctor", "--invariants", timeout=90)
        say("doctor --invariants finds nothing")
        daemons.check_probes(made, say)
        daemons.check_sizes(made, say)
        check_monitoring(made, NAME, say)
        # Placed by the Spark that has gone through all of it.
        submit(made, "wordcount.py", "--name", "afterwards", "--conf", "topology.workers=1")
        say(f"another topology runs after {wait_running(made, 'afterwards', 120):.1f} s")
    finally:
        print(table(watcher.rows), flush=True)
        watcher.close()
    return (
        all(row.healed is not None and not row.lost for row in watcher.rows)
        and not watcher.last["missing"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--short", action="store_true", help="at most 20 minutes with the base image"
    )
    parser.add_argument("--faults", default="", help="these alone, separated by commas")
    parser.add_argument("--rounds", type=int, default=0, help="afterwards so many samples")
    parser.add_argument("--sample", type=int, default=10, help="faults of a sample")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    if options.list:
        print("\n".join(all_faults(None, None)))  # type: ignore[arg-type]
        return 0
    # A caller that gives up leaves no containers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shutil.rmtree(LOGS, ignore_errors=True)
    small = () if options.short else (Path(__file__).with_name("small_disk.yaml"),)
    sound = True
    try:
        with containers(LOGS, *small) as made:
            say("building the images")
            print(made.setup().strip(), flush=True)
            say("images are built; starting the cluster")
            bad_input.check_all(made, say)
            if options.short:
                short(made)
            else:
                sound = full(
                    made,
                    [name for name in options.faults.split(",") if name],
                    options.rounds,
                    options.sample,
                )
            say("ending the cluster")
        check(project_is_empty(made), "containers or volumes are left")
    except Failure as error:
        say(f"FAILED: {error}")
        say(f"logs are in {LOGS}")
        return 1
    say("everything was as it must be" if sound else "FAILED: see the table")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
