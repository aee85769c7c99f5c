"""Settings of client libraries, and where their secrets come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from storm_dagster.connectors.settings import client_settings
from storm_dagster.model.errors import InvalidRequest


def test_settings_have_no_prefix_and_secrets_come_from_files_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("from a file\n")
    monkeypatch.setenv("BROKER_TOKEN", "from the environment")
    conf = {
        "kafka.bootstrap.servers": "127.0.0.1:9092",
        "kafka.sasl.password.file": str(tmp_path / "password"),
        "kafka.oauth.token.env": "BROKER_TOKEN",
        "topology.workers": 2,
    }
    assert client_settings(conf, "kafka.") == {
        "bootstrap.servers": "127.0.0.1:9092",
        "sasl.password": "from a file",
        "oauth.token": "from the environment",
    }


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"kafka.sasl.password": "hunter2"}, "kafka.sasl.password.file"),
        ({"kafka.ssl.key.pem": "-----BEGIN KEY----- hunter2"}, "kafka.ssl.key.pem.file"),
        ({"kafka.sasl.password.env": "NOT_THERE_4711"}, "no variable NOT_THERE_4711"),
        ({"kafka.sasl.password.file": "/no/such/file"}, "/no/such/file cannot be read"),
        (
            {"kafka.sasl.password.env": "HOME", "kafka.sasl.password.file": "/etc/hostname"},
            "given twice",
        ),
    ],
)
def test_a_secret_that_cannot_be_had_or_would_be_shown_is_refused(
    conf: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        client_settings(conf, "kafka.")
    assert "hunter2" not in str(caught.value)
