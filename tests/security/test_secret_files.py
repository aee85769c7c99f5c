"""Which users may read a file with a secret: its owner, or one group, if root owns the file."""

import grp
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.host.secret_files import refuse_shared_file
from storm_dagster.model.errors import InvalidRequest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")

SECRET = "a-secret-planted-for-tests-4711"
OWN = 54_321
"""Group of the process alone; no user of the machine has it as login group."""
UID = 12_345

# What it needs is loaded before it becomes another user, who may not read all of it.
_PROGRAM = """
import encodings.idna, grp, json, os, pwd, ssl, sys
from pathlib import Path
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.nimbus.dagster.transport import DagsterAccess
from storm_dagster.security.settings import Security, zookeeper_payload

uid, gid, groups, conf_dir, values = json.load(sys.stdin)
READERS = {
    "storm.secret.file": lambda conf: Security.of(conf).secret,
    "storm.tls.key": lambda conf: Security.of(conf).server_context() and "loaded",
    "storm.zookeeper.auth.file": zookeeper_payload,
    "dagster.graphql.token.file": lambda conf: DagsterAccess.of(conf).headers()["Authorization"],
}
load_cluster_conf()
os.setgroups(groups)
os.setgid(gid)
os.setuid(uid)
seen = {}
for key, own_values in values.items():
    try:
        seen[key] = READERS[key](load_cluster_conf(None, own_values))
    except StormDagsterError as error:
        seen[key] = error.message
try:
    seen["storm.yaml"] = load_cluster_conf(Path(conf_dir)).get("storm.secret")
except StormDagsterError as error:
    seen["storm.yaml"] = error.message
print(json.dumps(seen))
"""


@pytest.fixture
def folder(certificate: Callable[..., dict[str, str]]) -> Iterator[Path]:
    """Files with secrets as Kubernetes mounts them, in a folder that every user can enter."""
    top = Path(tempfile.mkdtemp(prefix="storm-secrets-", dir="/tmp"))
    top.chmod(0o755)
    try:
        (top / "secret").write_text(SECRET)
        (top / "auth").write_text("storm:password")
        (top / "token").write_text("token")
        (top / "storm.yaml").write_text(f"storm.secret: {SECRET}\n")
        tls = certificate()
        for name in ("cert", "key", "ca"):
            shutil.copyfile(tls[f"storm.tls.{name}"], top / name)
            (top / name).chmod(0o644)
        yield top
    finally:
        shutil.rmtree(top)


def read_all(
    folder: Path,
    *,
    mode: int,
    owner: int = 0,
    group: int = OWN,
    uid: int = UID,
    gid: int = UID,
    groups: tuple[int, ...] = (OWN,),
) -> dict[str, str]:
    """What a process reads of each place that names a secret file, or its error.

    The files have ``mode``, ``owner`` and ``group``; the process has ``uid``, ``gid``, ``groups``.
    """
    for name in ("secret", "key", "auth", "token", "storm.yaml"):
        os.chown(folder / name, owner, group)
        (folder / name).chmod(mode)
    tls = {f"storm.tls.{name}": str(folder / name) for name in ("cert", "key", "ca")}
    dagster = {"dagster.graphql.url": "http://127.0.0.1:1/graphql"}
    values: dict[str, dict[str, Any]] = {
        "storm.secret.file": {"storm.secret.file": str(folder / "secret")},
        "storm.tls.key": tls,
        "storm.zookeeper.auth.file": {"storm.zookeeper.auth.file": str(folder / "auth")},
        "dagster.graphql.token.file": {
            **dagster,
            "dagster.graphql.token.file": str(folder / "token"),
        },
    }
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([uid, gid, groups, str(folder), values]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(process.stdout)


READ = {
    "storm.secret.file": SECRET,
    "storm.tls.key": "loaded",
    "storm.zookeeper.auth.file": "storm:password",
    "dagster.graphql.token.file": "Bearer token",
    "storm.yaml": SECRET,
}


@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_a_secret_of_root_is_read_by_the_group_of_a_pod(folder: Path, mode: int) -> None:
    assert read_all(folder, mode=mode) == READ


def test_the_group_of_the_daemons_user_alone_may_read(folder: Path) -> None:
    # As in the image, whose user `storm` has a group of the same name.
    for user in pwd.getpwall():
        sharers = [other for other in pwd.getpwall() if other.pw_gid == user.pw_gid]
        has_own_group = grp.getgrgid(user.pw_gid).gr_name == user.pw_name
        if user.pw_uid and has_own_group and len(sharers) == 1:
            break
    else:
        pytest.skip("no user of this machine has a group of its own")
    seen = read_all(
        folder, mode=0o440, group=user.pw_gid, uid=user.pw_uid, gid=user.pw_gid, groups=()
    )
    assert seen == READ


def _refused(seen: dict[str, str], reason: str) -> None:
    """Each place refuses the file with the reason and a remedy, in one line without its content."""
    assert seen.keys() == READ.keys()
    for place, message in seen.items():
        assert reason in message and "chmod 600" in message, (place, message)
        assert "\n" not in message and SECRET not in message, (place, message)


@pytest.mark.parametrize("mode", [0o460, 0o660, 0o444, 0o450, 0o441])
def test_a_secret_that_others_use_is_refused(folder: Path, mode: int) -> None:
    _refused(read_all(folder, mode=mode), "read or written by other users")


def test_only_root_gives_a_secret_to_a_group(folder: Path) -> None:
    _refused(read_all(folder, mode=0o440, owner=UID), "read or written by other users")


def test_a_login_group_of_other_users_keeps_no_secret(folder: Path) -> None:
    other = next(user for user in pwd.getpwall() if user.pw_gid not in (0, OWN))
    seen = read_all(folder, mode=0o440, group=other.pw_gid, groups=(other.pw_gid,))
    _refused(seen, "is the login group of ")
    # Also the group in which processes of a container without a user of their own run.
    _refused(read_all(folder, mode=0o440, group=0, gid=0, groups=(0,)), "login group of root")


def test_a_group_that_is_not_of_the_process_keeps_no_secret(folder: Path) -> None:
    # Root reads the file nevertheless.
    _refused(read_all(folder, mode=0o440, uid=0, gid=0, groups=(0,)), "is not one of this process")


@pytest.mark.parametrize("owner", [0, UID])
def test_no_mode_that_lets_another_user_in_is_accepted(owner: int) -> None:
    """Of all modes, with a group that is not of this process."""
    group = 54_322
    assert group not in (os.getegid(), *os.getgroups())
    for mode in range(0o10000):
        status = os.stat_result((0o100000 | mode, 1, 1, 1, owner, group, 1, 0, 0, 0))
        if mode & 0o077:
            with pytest.raises(InvalidRequest, match=r"storm\.secret\.file /s .*: chmod 600 /s"):
                refuse_shared_file(Path("/s"), status, "storm.secret.file")
        else:
            refuse_shared_file(Path("/s"), status, "storm.secret.file")
