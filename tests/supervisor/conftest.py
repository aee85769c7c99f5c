"""A small real blob server, a stand-in worker program, and supervisors as real processes or
threads.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_rigs.servers.blob_server import BlobServer, serve_blobs

STAND_IN = '''\
    #!{python} -S
    """Stands in for a worker: beats, and behaves as topology.environment says."""
    import json, os, signal, subprocess, sys, time
    spec = json.load(open(sys.argv[-1]))
    behaviour = os.environ.get("STAND_IN", "")
    print("stand-in", spec["port"], os.getpid(), flush=True)
    with open(os.path.join(spec["home"], "starts"), "a") as starts:
        starts.write(json.dumps({{**spec, "pid": os.getpid(), "behaviour": behaviour, "argv": sys.argv,
                                  "cwd": os.getcwd(), "path": os.environ["PYTHONPATH"],
                                  "word": os.environ.get("WORD")}}) + chr(10))
    if behaviour == "crash":
        sys.exit(1)
    if behaviour == "silent":
        time.sleep(3600)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if behaviour == "flood":
        for _ in range(3000):
            print("x" * 9999, flush=True)
        print("the last word", flush=True)
    if behaviour == "child":
        child = subprocess.Popen(["sleep", "3600"])
        open(os.path.join(spec["home"], "child"), "w").write(str(child.pid))
    count = 0
    while True:
        count += 1
        if behaviour != "hang" or count < 3:
            text = json.dumps({{"pid": os.getpid(), "time_boot": time.monotonic(), "count": count,
                               "status": "running"}}).ljust(512)
            if count == 1:
                temporary = spec["heartbeat_path"] + ".tmp"
                with open(temporary, "w") as beat:
                    beat.write(text)
                os.replace(temporary, spec["heartbeat_path"])
                beats = os.open(spec["heartbeat_path"], os.O_WRONLY)
            else:
                os.pwrite(beats, text.encode(), 0)
        if os.path.exists(os.path.join(spec["home"], "supersede")):
            sys.exit(3)
        time.sleep(0.05)
'''


@pytest.fixture
def blob_server() -> Iterator[BlobServer]:
    """A real HTTP server on a free port."""
    with serve_blobs() as blobs:
        yield blobs


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """Path of an executable that stands in for ``topology.python``."""
    path = tmp_path / "stand-in"
    path.write_text(textwrap.dedent(STAND_IN).format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return str(path)
