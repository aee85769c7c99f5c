"""What a supervisor hands to the workers that it starts: nothing by which they could act as the
cluster or as Dagster.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storm_dagster.core.slots.model import Work
from storm_dagster.model.conf import SECRET_KEYS, default_conf
from storm_dagster.supervisor.launcher import Launcher
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.testing.waiting import patience

ENVIRONMENT = (
    *(
        "DAGSTER_HOME",
        "DAGSTER_POSTGRES_PASSWORD",
        "DAGSTER_POSTGRES_URL",
        "DAGSTER_PG_PASSWORD",
        "PGPASSWORD",
        "PGUSER",
    ),
    *(
        "PGPASSFILE",
        "PGSERVICEFILE",
        "DATABASE_URL",
        "DAGSTER_CLOUD_API_TOKEN",
        "DAGSTER_CLOUD_AGENT_TOKEN",
    ),
    *(
        "AWS_SECRET_ACCESS_KEY",
        "SPARK_CONNECT_AUTHENTICATE_TOKEN",
        "STORM_DAGSTER_SECRET",
        "SSH_AUTH_SOCK",
    ),
)
GRAPHQL = {
    "dagster.graphql.url": "https://planted-user:planted-password@dagster.example/graphql?planted-query",
    "dagster.graphql.headers": {"Dagster-Cloud-Api-Token": "planted-header"},
    "dagster.graphql.token.file": "/planted-file",
}


def test_no_credentials_of_dagster_reach_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, f"planted-{name}")
    python, code = tmp_path / "python", tmp_path / "code"
    python.write_text("#!/bin/sh\nenv > environment\ncat /proc/$$/cmdline > command\n")
    python.chmod(0o755)
    code.mkdir()
    (code / "stormconf.ser").write_text(json.dumps({"topology.python": str(python)}))
    # The password of a key that workers read themselves is theirs, too, unless they run as other
    # users.
    secrets = SECRET_KEYS - {*GRAPHQL, "storm.zookeeper.ssl.keystore.password"}
    conf = {**default_conf(), **GRAPHQL, **{key: f"storm:planted-{key}" for key in secrets}}
    launched = Launcher(tmp_path, "s1", "127.0.0.1", conf).launch(
        6900, Work("a-1-1", "a-1-1"), LocalCode(code, "0" * 64)
    )
    assert launched.process.child is not None and launched.process.child.wait(patience(30)) == 0
    (folder,) = (tmp_path / "workers").iterdir()
    written = {file.name: file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert (
        written.keys() >= {"environment", "command", "SPEC.json"}
        and "PATH=" in written["environment"]
    )
    found = [
        (name, text[max(0, text.find("planted") - 60) :][:100])
        for name, text in written.items()
        if "planted" in text
    ]
    assert not found
