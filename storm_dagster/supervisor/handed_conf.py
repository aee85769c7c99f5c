"""Conf keys and variables that workers get from their supervisor.

Workers get what they read, by the column ``worker`` of ``conf_keys.yaml``. A topology's own conf is
not filtered: it comes with the code and goes whole to its own workers.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from storm_dagster.model.conf import CONF_KEYS, is_secret_key
from storm_dagster.security.zookeeper_access import PAYLOAD

CREDENTIAL_KEYS = frozenset(
    {
        "storm.secret",
        "storm.secret.file",
        "storm.tls.cert",
        "storm.tls.key",
        "storm.zookeeper.auth.file",
        PAYLOAD,
        "dagster.graphql.url",
        "dagster.graphql.headers",
        "dagster.graphql.token.file",
    }
)
"""Keys that no worker gets, whatever ``supervisor.worker.conf`` lists."""
_PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "PYTHON*",
    "SPARK_HOME",
    "SPARK_LOCAL_IP",
    "PYSPARK_PYTHON",
    "JAVA_HOME",
    "SSL_CERT_*",
    "REQUESTS_CA_BUNDLE",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
)
"""Variables of the supervisor that a worker needs; any other one may be a password of its host."""
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@|^[^/?#\s]*@")
"""User and password of a proxy, whose address may lack a scheme."""
_SPARK_CREDENTIAL = re.compile(r";(?:token|authorization)=[^;]*", re.IGNORECASE)
"""Parameters of a Spark Connect URL that open the server."""


def handed_conf(conf: Mapping[str, Any], other_user: bool) -> dict[str, Any]:
    """The values of the cluster's ``conf`` that workers get.

    These are the known keys that workers read and the keys that ``supervisor.worker.conf`` lists.
    A worker of the supervisor's own user also gets the keys that the system does not know, which
    components may read: it could read them in ``storm.yaml``. With ``other_user`` it gets no such
    key, and ``spark.remote`` without its credential. No worker gets :data:`CREDENTIAL_KEYS`.
    """
    patterns = conf["supervisor.worker.conf"]
    values: dict[str, Any] = {}
    for key, value in conf.items():
        if key in CREDENTIAL_KEYS:
            continue
        conf_key = CONF_KEYS.get(key)
        if conf_key is not None:
            is_handed = conf_key.worker
        else:
            is_handed = not other_user
        if is_handed or matches(key, patterns):
            values[key] = value
    if other_user:
        remote = values.get("spark.remote")
        if remote:
            values["spark.remote"] = _SPARK_CREDENTIAL.sub("", str(remote))
    return values


def handed_environment(
    base: Mapping[str, str], allowed: Iterable[str], other_user: bool
) -> dict[str, str]:
    """The variables of ``base`` that a worker needs, or that a pattern of ``allowed`` matches.

    With ``other_user`` a proxy has no login, and a variable with the name of a secret, such as
    ``PYTHON_KEYRING_PASSWORD``, must be ``allowed``.
    """
    patterns = tuple(allowed)
    environment: dict[str, str] = {}
    for name, value in base.items():
        if matches(name, patterns):
            environment[name] = value
        elif not matches(name, _PASSED_ON):
            continue
        elif not other_user:
            environment[name] = value
        elif name.lower().endswith("_proxy"):
            environment[name] = _LOGIN.sub("", value)
        elif not is_secret_key(name):
            environment[name] = value
    return environment


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if a pattern matches the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
