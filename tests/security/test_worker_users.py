"""A worker of another user reads its own files and nobody else's."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.core.slots.model import Work
from storm_dagster.host.clock import boot_clock
from storm_dagster.host.files import make_home_private
from storm_dagster.host.worker_spec import HeartbeatFile, worker_processes
from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.supervisor.launcher import Launcher
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.supervisor.processes import LiveWorker
from storm_dagster.supervisor.running_workers import find_workers
from storm_dagster.supervisor.worker_user import worker_user
from storm_dagster.testing.waiting import eventually

_PYTHON = "/usr/bin/python3"
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists(_PYTHON),
    reason="only root runs processes of other users",
)
SECRET = "s3cret-of-the-cluster-0123456789"

# Runs as `python -m storm_dagster.worker SPEC.json`: waits for its orders, tries all of them, and
# says what it got.
_ATTACKER = f"""\
#!{_PYTHON} -S
import json, os, signal, sys, time
orders = os.path.join(os.environ["HOME"], "orders")
spec = json.load(open(sys.argv[-1]))
print("up", flush=True)
open(spec["log_path"], "a").write("as a worker logs\\n")
while not os.path.exists(orders):
    time.sleep(0.02)
got = {{"uid": os.getuid(), "groups": os.getgroups(), "read": [], "listed": [], "written": [], "killed": []}}
got["code"] = open(os.path.join(spec["code_dir"], "code", "wc.py")).read()
for kind, what in json.load(open(orders)):
    try:
        if kind == "read":
            open(what, "rb").read(1)
        elif kind == "listed":
            os.listdir(what)
        elif kind == "written":
            open(what, "ab").close()
        else:
            os.kill(what, 0)
    except OSError:
        continue
    got[kind].append(what)
open(orders + ".tmp", "w").write(json.dumps(got))
os.rename(orders + ".tmp", orders + ".done")
time.sleep(600)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A HOME that other users can reach, unlike the folders of pytest."""
    top = Path(tempfile.mkdtemp(prefix="storm-users-", dir="/tmp"))
    top.chmod(0o755)
    before = os.umask(0o077)
    try:
        yield make_home_private(top / "home")
    finally:
        os.umask(before)
        shutil.rmtree(top)


@pytest.fixture
def launch(home: Path) -> Iterator[Callable[..., LiveWorker]]:
    """Starts the attacker as a worker; ``submitter`` is the user, else uid 65533 is."""
    program = home.parent / "attacker"
    program.write_text(_ATTACKER)
    program.chmod(0o755)
    (home / "secret").write_text(SECRET)
    values = {"storm.secret.file": str(home / "secret"), "supervisor.run.worker.as.user": True}
    launcher = Launcher(
        home, "s1", "127.0.0.1", {**default_conf(), **values, "supervisor.worker.user": "65533"}
    )
    started: list[LiveWorker] = []

    def start(topology_id: str, port: int, **conf: Any) -> LiveWorker:
        code = home / "supervisor" / "s1" / "stormdist" / topology_id
        (code / "code").mkdir(parents=True)
        (code / "stormjar.jar").write_text("the archive")
        (code / "stormcode.ser").write_text("{}")
        (code / "code" / "wc.py").write_text(f"id = '{topology_id}'\n")
        (code / "stormconf.ser").write_text(json.dumps({**conf, "topology.python": str(program)}))
        started.append(
            launcher.launch(port, Work(topology_id, topology_id), LocalCode(code, "0" * 64))
        )
        return started[-1]

    yield start
    for each in started:
        each.process.end()
        assert each.process.child is not None
        each.process.child.wait()


def attack(home: Path, uid: int, orders: list[tuple[str, Any]]) -> dict[str, Any]:
    folder = home / "users" / str(uid)
    (folder / "orders.new").write_text(json.dumps(orders))
    (folder / "orders.new").chmod(0o644)
    os.rename(folder / "orders.new", folder / "orders")
    eventually(lambda: (folder / "orders.done").exists(), what="the attack")
    return json.loads((folder / "orders.done").read_text())


def test_a_worker_reads_its_own_files_and_nobody_elses(
    home: Path, launch: Callable[..., LiveWorker]
) -> None:
    for name in ("storm.yaml", "dev.json", "spark.token"):
        (home / name).write_text("zookeeper: password")
        (home / name).chmod(0o644)  # As some tools leave them; HOME alone kept them closed.
    mine = launch("a-1-1", 6900, **{"topology.submitter.user": "nobody"})
    other = launch("b-1-1", 6901)
    for name in ("storm.yaml", "dev.json", "spark.token"):
        (home / name).chmod(0o600)
    workers, dist = home / "workers", home / "supervisor" / "s1" / "stormdist"
    eventually(lambda: "up" in other.log_path.read_text(), what="the other worker")
    files = [path for path in sorted(home.rglob("*")) if path.is_file() and not path.is_symlink()]
    own = workers / mine.worker.id / "own"
    foreign = [
        str(path)
        for path in files
        if own not in path.parents and home / "users" / "65534" not in path.parents
    ]
    closed = [
        str(path)
        for path in (home, workers, home / "users", home / "users" / "65533", dist, home / "logs")
    ]
    closed += [str(workers / other.worker.id / "own"), str(workers / mine.worker.id)]
    codes = [str(path) for path in (own / "a-1-1").rglob("*") if path.is_file()]
    orders = [
        *(
            ("read", path)
            for path in [
                *foreign,
                f"/proc/{other.process.pid}/environ",
                f"/proc/{os.getpid()}/environ",
            ]
        ),
        *(("listed", path) for path in closed),
        *(("written", path) for path in [*foreign, *codes]),
        *(("killed", pid) for pid in (other.process.pid, os.getpid())),
    ]
    assert any(SECRET in Path(path).read_text(errors="replace") for path in foreign)
    assert any(path.endswith("SPEC.json") and other.worker.id in path for path in foreign)
    got = attack(home, 65534, orders)
    assert (got["uid"], got["groups"], got["code"]) == (65534, [], "id = 'a-1-1'\n")
    assert not got["read"] and not got["listed"] and not got["written"] and not got["killed"]
    assert "as a worker logs" in mine.log_path.read_text()
    assert SECRET not in (own / "SPEC.json").read_text()
    assert not (own / "a-1-1" / "stormjar.jar").exists()
    # Another daemon that begins in this HOME leaves the way open, and the rest closed.
    assert make_home_private(home).stat().st_mode & 0o777 == 0o711


def test_a_worker_with_a_former_secret_starts_again(
    home: Path, launch: Callable[..., LiveWorker]
) -> None:
    launch("a-1-1", 6900)
    conf = {**default_conf(), "storm.secret.file": str(home / "secret")}
    new = "of-the-cluster-from-now-on-4711"
    for lines, current in (((SECRET,), True), ((new, SECRET), True), ((new,), False)):
        (home / "secret").write_text("\n".join(lines))
        (found,) = find_workers(home, "s1", conf)
        # Work that no assignment names is replaced.
        assert (found.worker.work == Work("a-1-1", "a-1-1")) is current, lines


def test_the_next_supervisor_finds_them_and_believes_its_own_spec(
    home: Path, launch: Callable[..., LiveWorker]
) -> None:
    mine = launch("a-1-1", 6900, **{"topology.submitter.user": "nobody"})
    eventually(lambda: "up" in mine.log_path.read_text(), what="the worker")
    own = home / "workers" / mine.worker.id / "own" / "SPEC.json"
    own.write_text(
        json.dumps({**json.loads(own.read_text()), "port": 6999, "log_path": "/etc/passwd"})
    )
    # Another user's process with the command line of that worker.
    line = [
        _PYTHON,
        "-S",
        "-c",
        "import time; time.sleep(600)",
        "-m",
        "storm_dagster.worker",
        str(own),
    ]
    forged = subprocess.Popen(
        line, user=65532, group=65532, extra_groups=(), cwd="/", start_new_session=True
    )
    try:
        eventually(
            lambda: forged.pid in {each.pid for each, _ in worker_processes()},
            what="the forged worker",
        )
        (found,) = find_workers(home, "s1", default_conf())
    finally:
        forged.kill()
        forged.wait()
    assert (found.process.pid, found.port, found.log_path) == (
        mine.process.pid,
        6900,
        mine.log_path,
    )
    assert found.heartbeat_path == mine.heartbeat_path
    started = boot_clock()
    mine.heartbeat_path.unlink(missing_ok=True)
    os.mkfifo(mine.heartbeat_path)
    assert HeartbeatFile.read(mine.heartbeat_path) is None and boot_clock() - started < 30
    mine.heartbeat_path.unlink()
    mine.heartbeat_path.symlink_to(home / "secret")
    assert HeartbeatFile.read(mine.heartbeat_path) is None


@pytest.mark.parametrize(
    ("submitter", "configured", "says"),
    [
        ("root", "65533", "system user"),
        ("daemon", "65533", "system user"),
        (None, None, "no user of this host"),
        ("nobody-knows-me", None, "no user of this host"),
        (None, "0", "no user of this host"),
        (None, "root", "no user of this host"),
    ],
)
def test_nobody_runs_as_root_or_as_a_service(
    submitter: str | None, configured: str | None, says: str
) -> None:
    conf = {
        **default_conf(),
        "supervisor.run.worker.as.user": True,
        "supervisor.worker.user": configured,
    }
    with pytest.raises(InvalidTopology, match=says):
        worker_user(conf, {"topology.submitter.user": submitter})
    assert worker_user(default_conf(), {"topology.submitter.user": submitter}) is None


def test_a_user_that_is_named_by_its_number_has_its_own_group() -> None:
    conf = {**default_conf(), "supervisor.run.worker.as.user": True}
    known = next(each for each in pwd.getpwall() if each.pw_uid and each.pw_gid != each.pw_uid)
    unknown = next(
        number
        for number in range(60_000, 0, -1)
        if number not in {each.pw_uid for each in pwd.getpwall()}
    )
    for number, group in ((known.pw_uid, known.pw_gid), (unknown, unknown)):
        user = worker_user({**conf, "supervisor.worker.user": str(number)}, {})
        assert user is not None and (user.uid, user.gid) == (number, group)


def test_a_home_that_workers_cannot_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    conf = {**default_conf(), "supervisor.run.worker.as.user": True}
    with pytest.raises(InvalidRequest, match="is closed to other users"):
        Launcher(tmp_path / "home", "s1", "127.0.0.1", conf)


def test_no_conf_of_the_host_names_the_submitter(home: Path) -> None:
    """The supervisor's own conf holds for every topology: it must not choose the user."""
    conf = {
        **default_conf(),
        "supervisor.run.worker.as.user": True,
        "topology.submitter.user": "daemon",
    }
    code = home / "code"
    code.mkdir()
    (code / "stormconf.ser").write_text("{}")
    launcher = Launcher(home, "s1", "127.0.0.1", conf)
    with pytest.raises(InvalidTopology, match=r"topology\.submitter\.user: not set"):
        launcher.launch(6900, Work("a-1-1", "a-1-1"), LocalCode(code, "0" * 64))
