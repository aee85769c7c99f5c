"""Conf: precedence and origin, types, unknown keys with the nearest known one, valid defaults."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

import storm_dagster
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.conf import (
    CONF_KEYS,
    HIDDEN,
    OWNED_PREFIXES,
    Kind,
    check_value,
    default_conf,
    keys_without_meaning,
    mask,
    parse_assignments,
    unknown_keys,
    validate_conf,
)
from storm_dagster.model.errors import InvalidRequest, InvalidTopology


def test_every_default_is_valid_and_every_key_says_what_it_is() -> None:
    validate_conf(default_conf(), source="conf_keys.yaml")
    for key, known in CONF_KEYS.items():
        assert known.kind in get_args(Kind) and known.doc, key
        assert known.default is None or check_value(key, known.default) is None, key


def test_later_sources_win_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text("topology.workers: 3\nnimbus.http.port: 0\n")
    conf = load_cluster_conf(tmp_path, {"topology.workers": 4})
    assert (conf["topology.workers"], conf.origins["topology.workers"]) == (4, "-c")
    assert conf.origins["nimbus.http.port"] == str(tmp_path / "storm.yaml")
    assert conf.origins["topology.acker.executors"] == "default"


def test_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(InvalidRequest, match=r"topology\.workers"):
        validate_conf({"topology.wrokers": 2}, source="--conf")
    _, warnings = validate_conf({"topology.wrokers": 2}, source="thrift", unknown="warn")
    assert len(warnings) == 1


def test_other_prefixes_belong_to_the_user() -> None:
    assert unknown_keys({"my.key": 1, "wordcount.limit": 2}) == {}
    assert all(prefix.endswith(".") for prefix in OWNED_PREFIXES)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("topology.workers", "3"),
        ("topology.workers", 0),
        ("topology.workers", True),
        ("topology.workers", 2.5),
        ("topology.workers", None),
        ("topology.acker.executors", -1),
        ("topology.debug", 1),
        ("supervisor.slots.ports", "6900"),
        ("supervisor.slots.ports", [6900, "x"]),
        ("topology.environment", {"A": 1, 2: 3}),
        ("topology.scheduler.strategy", "clever"),
        ("nimbus.http.port", 70_000),
        ("topology.metric.sample.rate", 1.5),
        ("supervisor.drain.secs", math.nan),
        ("supervisor.drain.secs", math.inf),
    ],
)
def test_values_of_a_wrong_type_or_size(key: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=key.replace(".", r"\.")):
        validate_conf({key: value}, source="--conf")


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_conf({"topology.workers": "x", "topology.debug": 3}, source="f")
    assert "topology.workers" in caught.value.message and "topology.debug" in caught.value.message


def test_assignments_from_the_command_line_are_yaml_values() -> None:
    assert parse_assignments(["a=3", "b=x", "c=[1, 2]", "d=true", "e="]) == {
        "a": 3, "b": "x", "c": [1, 2], "d": True, "e": None,
    }  # fmt: skip
    for wrong in ("a", "=3", "a=[", "a=!!python/object/apply:os.system ['x']", "a=2026-02-30"):
        with pytest.raises(InvalidRequest):
            parse_assignments([wrong])


def test_damaged_yaml_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text("a: [")
    with pytest.raises(InvalidRequest, match=r"storm\.yaml"):
        load_cluster_conf(tmp_path)


def test_nimbus_host_is_one_seed_with_a_warning() -> None:
    conf = load_cluster_conf(None, {"nimbus.host": "n1"})
    assert conf["nimbus.seeds"] == ["n1"] and "deprecated" in conf.warnings[0]


STORM_YAML = """
storm.zookeeper.servers: [zk1, zk2]
storm.zookeeper.port: 2181
storm.local.dir: /var/storm
nimbus.seeds: [n1]
nimbus.childopts: -Xmx1024m
supervisor.childopts: -Xmx256m
worker.childopts: -Xmx%HEAP-MEM%m
worker.heap.memory.mb: 768
worker.gc.childopts: ""
ui.port: 8080
ui.host: 0.0.0.0
logviewer.port: 8000
drpc.servers: [d1]
drpc.port: 3772
pacemaker.servers: [p1]
java.library.path: /usr/local/lib
supervisor.slots.ports: [6700, 6701]
supervisor.memory.capacity.mb: 4096.0
supervisor.cpu.capacity: 400.0
storm.messaging.transport: org.apache.storm.messaging.netty.Context
storm.messaging.netty.max_retries: 300
storm.thrift.transport: org.apache.storm.security.auth.SimpleTransportPlugin
storm.cluster.state.store: org.apache.storm.cluster.ZKStateStorageFactory
nimbus.blobstore.class: org.apache.storm.blobstore.LocalFsBlobStore
topology.scheduler.strategy: org.apache.storm.scheduler.resource.strategies.scheduling.DefaultResourceAwareStrategy
multitenant.scheduler.user.pools: {evans: 10}
blacklist.scheduler.tolerance.time.secs: 300
resource.aware.scheduler.priority.strategy: org.apache.storm.scheduler.resource.strategies.priority.Default
isolation.scheduler.machines: {wc: 2}
topology.kryo.register: []
topology.component.cpu.pcore.percent: 10.0
zmq.threads: 1
"""


def test_a_conf_written_for_storm_loads_and_says_what_means_nothing(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text(STORM_YAML)
    conf = load_cluster_conf(tmp_path)
    assert conf["storm.zookeeper.servers"] == ["zk1", "zk2"] and conf["supervisor.slots.ports"] == [
        6700,
        6701,
    ]
    assert (conf["supervisor.memory.capacity.mb"], conf["supervisor.cpu.capacity"]) == (4096, 400)
    other = (
        "nimbus.blobstore.class",
        "topology.scheduler.strategy",
        "isolation.scheduler.machines",
    )
    for key in ("storm.cluster.state.store", *other):
        assert conf[key] == default_conf()[key]
    warnings = "\n".join(conf.warnings)
    for key, value in yaml.safe_load(STORM_YAML).items():
        ignored = key not in CONF_KEYS or "org.apache" in str(value) or isinstance(value, dict)
        assert (key in warnings) == ignored, key
    with pytest.raises(InvalidTopology, match="must be a list of strings"):
        validate_conf(
            {"isolation.scheduler.machines": {"wc": 2}}, source="topology", submitted=True
        )
    # One sentence for each reason, not for each key.
    assert len(conf.warnings) == len(set(conf.warnings)) < 15


def test_keys_below_prefixes_of_users_reach_the_code_of_a_topology() -> None:
    mine = {"ui.color": "red", "drpc.servers": ["mine"]}
    assert validate_conf(mine, source="topology", submitted=True) == (mine, [])


def test_a_key_family_of_storm_hides_neither_known_keys_nor_typos() -> None:
    assert not [key for key in keys_without_meaning() if key in CONF_KEYS]
    for key in CONF_KEYS:
        assert validate_conf({key: default_conf()[key]}, source="f") == (
            {key: default_conf()[key]},
            [],
        )
    for typo in (
        "topology.wrokers",
        "nimbus.http.prot",
        "storm.zookeeper.server",
        "worker.memory.sizes",
    ):
        assert typo in unknown_keys({typo: 1})


# Keys that are put together where they are read: pattern of what is read there -> the module.
PUT_TOGETHER = {
    "nimbus.executors.perTopology": (
        r'"executors".*nimbus\.\{unit\}\.perTopology',
        "core/submission/validation.py",
    ),
    "nimbus.slots.perTopology": (
        r'"slots".*nimbus\.\{unit\}\.perTopology',
        "core/submission/validation.py",
    ),
    "topology.bolts.late.tuple.stream": (r"_PREFIX\}late\.tuple\.stream", "api/windows.py"),
}
WITHOUT_READER = {
    "storm.zookeeper.auth.scheme": "it has one value, which a conf for Storm may state"
}


def test_every_key_has_a_reader() -> None:
    package = Path(storm_dagster.__file__).parent
    sources = {
        str(path.relative_to(package)): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
        if path.name != "conf_schema.py"
    }
    for key in CONF_KEYS.keys() - WITHOUT_READER.keys():
        if key in PUT_TOGETHER:
            pattern, module = PUT_TOGETHER[key]
            assert re.search(pattern, sources[module], re.DOTALL), key
            continue
        names = {f'"{key}"', f'"{key.removeprefix("topology.bolts.")}"'}
        assert any(name in text for text in sources.values() for name in names), (
            f"nothing reads {key}: remove it"
        )


@pytest.mark.parametrize(
    "key",
    [
        *("db.password", "DB_PASSWD", "pgpass.passwd", "db.pwd", "MYSQL_PWD", "key.passphrase"),
        *(
            "client_secret",
            "SecretKey",
            "oauth2.token",
            "GITHUB_TOKEN",
            "x-auth-token",
            "proxy.auth",
        ),
        *(
            "aws_access_key_id",
            "AWS_SECRET_ACCESS_KEY",
            "access-key",
            "apikey",
            "API_KEY",
            "api.key",
        ),
        *("db.encryption_key", "encryptionKey", "kafka.ssl.key", "SSL_KEY", "tls.private.key"),
        *(
            "privateKey",
            "rsa.private",
            "signing_key",
            "azure.account-key",
            "shared_key",
            "masterkey",
        ),
        *("client.key.pem", "sas.signature", "spark.kerberos.keytab", "http.bearer", "card.pin"),
        *("google.credentials", "session_cookie", "sasl.jaas.config", "http.authorization"),
        *("alert.webhook", "SLACK_WEBHOOK_URL", "digest.payload", "my.storm.secret"),
    ],
)
def test_telltale_names_hide_their_values(key: str) -> None:
    assert mask({key: "planted"}) == {key: HIDDEN}


def test_harmless_names_and_values_are_shown() -> None:
    shown = {
        "storm.zookeeper.ssl.keystore.path": "/etc/key.pem",
        "storm.zookeeper.auth.scheme": "digest",
        "authors": ["ann"],
        "arguments": ["--level", "3"],
        "spinner": "x",
        "db.passwd.file": "/run/secrets/db",
        "access.token.secs": 3600,
        "token_ttl": 60,
        "secret.count": 2,
        "password.enabled": "yes",
        "storm.zookeeper.ssl.truststore.path": "/etc/ca.pem",
        "kafka.ssl.keystore.location": "/etc/keystore",
        "shipping": "x",
        "private.network": "10.0.0.0/8",
        "keys": ["a"],
        "partition.key": "user",
        "author": "ann",
    }
    assert mask(shown) == shown


def test_secrets_among_arguments_and_addresses_are_hidden() -> None:
    arguments = ["run", "--password", "planted", "--db-token=planted", "--level", "3"]
    assert mask({"command": arguments}) == {
        "command": ["run", "--password", HIDDEN, f"--db-token={HIDDEN}", "--level", "3"]
    }
    for hook in (
        "https://hooks.slack.com/services/T000/B000/planted",
        "https://discord.com/api/webhooks/1/planted",
        "https://x.webhook.office.com/webhookb2/planted",
    ):
        assert "planted" not in mask({"alert.url": f"see {hook}"})["alert.url"]
