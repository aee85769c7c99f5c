"""In a container of the cluster: one JSON line each second about the topology of every_number.py,
until standard input ends.

``written`` lines are in the files, ``different`` numbers; ``newest`` is the highest; ``done`` is
the number below which the spout has all acks; ``missing`` of those are in no file, which is loss.
``running`` of ``tasks`` tasks run as nimbus sees it (null: no nimbus answers).
"""

import json
import sys
import threading
import time
from pathlib import Path

from storm_dagster.client import NimbusClient
from storm_dagster.host.endpoints import cluster_conf
from storm_dagster.testing.task_state import read_task_states

NAME = sys.argv[1]
HOME = Path("/var/lib/storm_dagster")
STATE = Path("/var/lib/storm_state")
seen: dict = {"running": None, "tasks": None, "workers": [], "errors": []}


def ask_nimbus() -> None:
    while True:
        try:
            with NimbusClient.of_cluster(cluster_conf(HOME), HOME, patience=0.0) as nimbus:
                found = nimbus.get(f"/v1/topologies/{NAME}")
            tasks = found["tasks"]
            seen["running"] = sum(task["status"] == "running" for task in tasks)
            seen["tasks"] = len(tasks)
            seen["workers"] = [
                [w["host"], w["port"], w["pid"], w["tasks"]] for w in found["workers"]
            ]
            seen["errors"] = [error["error"][:300] for error in found["errors"][-20:]]
        except Exception as error:
            seen["running"], seen["why"] = None, str(error)[:200]
        time.sleep(1)


def wait_for_end() -> None:
    sys.stdin.read()
    ended.set()


ended = threading.Event()
threading.Thread(target=ask_nimbus, daemon=True).start()
threading.Thread(target=wait_for_end, daemon=True).start()
offsets: dict[Path, int] = {}
different: set[int] = set()
written = newest = done = 0
while not ended.wait(1.0):
    for path in (STATE / "written").glob("*.txt"):
        with path.open("rb") as file:
            file.seek(offsets.get(path, 0))
            part = file.read()
        whole = part[: part.rfind(b"\n") + 1]
        offsets[path] = offsets.get(path, 0) + len(whole)
        numbers = [int(line) for line in whole.split()]
        written += len(numbers)
        different.update(numbers)
        newest = max(newest, max(numbers, default=0))
    try:
        for state in read_task_states(STATE, NAME, "numbers").values():
            done = max(done, int(state.get("done", 0)))
    except Exception as error:
        seen["why"] = f"{STATE}: {error}"[:200]
    missing = done - sum(number <= done for number in different)
    row = {
        "at": time.time(),
        "written": written,
        "different": len(different),
        "newest": newest,
        "done": done,
    }
    print(json.dumps({**row, "missing": missing, **seen}), flush=True)
