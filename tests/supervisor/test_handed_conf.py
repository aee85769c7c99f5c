"""What of the cluster's conf and of the supervisor's environment workers get."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import storm_dagster
from storm_dagster.model.conf import CONF_KEYS, SECRET_KEYS, default_conf
from storm_dagster.security.settings import Security
from storm_dagster.supervisor.handed_conf import (
    CREDENTIAL_KEYS,
    handed_conf,
    handed_environment,
)

PACKAGE = Path(storm_dagster.__file__).parent
READERS = (
    "worker",
    "api",
    "connectors",
    "core/dataplane",
    "security/settings.py",
    "zk/storm_cluster_state.py",
)
"""Code that runs in a worker and reads its conf."""
REMOTE = "sc://spark1:15002/;token=T;user_id=u"
PLANTED: dict[str, Any] = {
    "spark.hadoop.fs.s3a.secret.key": "planted",
    "own.key": "planted",
    "blobstore.dir": "s3://KEY:planted@bucket/storm",
    "dagster.graphql.headers": {"Dagster-Cloud-Api-Token": "planted"},
    "storm.secret": "planted",
}


def constants(path: Path) -> set[str]:
    """Every text in the code of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        item.value
        for item in ast.walk(tree)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }


def test_workers_get_every_key_that_their_code_reads() -> None:
    read: dict[str, Path] = {}
    for reader in READERS:
        place = PACKAGE / reader
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        for file in files:
            read.update(dict.fromkeys(constants(file) & CONF_KEYS.keys(), file))
    assert {"worker.heartbeat.frequency.secs", "spark.remote"} <= read.keys()
    # Keys of the cluster's own credentials, which daemons read by the same code.
    shared = read.keys() - CREDENTIAL_KEYS
    missing = {key: read[key] for key in shared if not CONF_KEYS[key].worker}
    assert not missing, "set worker: true in conf_keys.yaml, or do not read the key in a worker"


@pytest.mark.parametrize("other_user", [False, True])
def test_no_worker_gets_a_credential_of_the_cluster(other_user: bool) -> None:
    listed = {"supervisor.worker.conf": ["*"]}
    handed = handed_conf({**default_conf(), **PLANTED, **listed}, other_user)
    assert not handed.keys() & CREDENTIAL_KEYS
    keystore = "storm.zookeeper.ssl.keystore.password"
    assert {key for key in handed if key in SECRET_KEYS} <= {keystore}


@pytest.mark.parametrize("other_user", [False, True])
def test_a_worker_knows_the_authority_of_nimbus(other_user: bool) -> None:
    tls = {f"storm.tls.{name}": f"/etc/{name}.pem" for name in ("cert", "key", "ca")}
    security = Security.of(handed_conf({**default_conf(), **tls}, other_user))
    # Without it the worker's reports for Dagster end in a failed TLS handshake.
    assert (security.cert, security.key, security.ca) == (None, None, "/etc/ca.pem")


def test_a_worker_of_another_user_gets_what_workers_read() -> None:
    conf = {**default_conf(), **PLANTED, "spark.remote": REMOTE, "topology.priority": 3}
    handed = handed_conf(conf, other_user=True)
    assert "planted" not in repr(handed)
    assert handed["spark.remote"] == "sc://spark1:15002/;user_id=u"
    assert handed["topology.priority"] == 3
    listed = handed_conf({**conf, "supervisor.worker.conf": ["own.*"]}, other_user=True)
    assert listed["own.key"] == "planted"


def test_a_worker_of_the_same_user_keeps_own_keys_and_spark() -> None:
    conf = {**default_conf(), **PLANTED, "spark.remote": REMOTE}
    handed = handed_conf(conf, other_user=False)
    assert handed["own.key"] == "planted"
    assert handed["spark.remote"] == REMOTE
    assert "blobstore.dir" not in handed


ENVIRONMENT = {
    "PATH": "/bin",
    "PYTHONPATH": "/code",
    "PYTHON_KEYRING_PASSWORD": "planted",
    "HTTPS_PROXY": "http://user:planted@proxy:3128/",
    "all_proxy": "user:planted@proxy:1080",
    "NO_PROXY": "localhost,example.org",
    "AWS_SECRET_ACCESS_KEY": "planted",
}


def test_another_user_gets_no_login_and_no_secret_of_the_environment() -> None:
    handed = handed_environment(ENVIRONMENT, (), other_user=True)
    assert handed == {
        "PATH": "/bin",
        "PYTHONPATH": "/code",
        "HTTPS_PROXY": "http://proxy:3128/",
        "all_proxy": "proxy:1080",
        "NO_PROXY": "localhost,example.org",
    }
    assert handed_environment(ENVIRONMENT, ("AWS_*",), other_user=True).keys() - handed.keys() == {
        "AWS_SECRET_ACCESS_KEY"
    }


def test_the_same_user_gets_its_proxies_as_they_are() -> None:
    handed = handed_environment(ENVIRONMENT, (), other_user=False)
    assert handed["HTTPS_PROXY"] == ENVIRONMENT["HTTPS_PROXY"]
    assert "AWS_SECRET_ACCESS_KEY" not in handed
