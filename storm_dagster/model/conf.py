"""Conf maps: known keys, validation, origins of values, masks of secrets.

A conf is a flat map of dotted keys. Cluster conf is the shipped ``conf_keys.yaml``, then
``storm.yaml`` and ``storm.d/*.yaml`` of HOME or ``--conf-dir``, then ``-c KEY=VALUE``; a topology's
conf is laid over it.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.removed_keys import take_removed_keys
from storm_dagster.model.strategies import STRATEGIES
from storm_dagster.model.tables import load_table
from storm_dagster.model.yaml_text import load_yaml

HIDDEN = "*****"
"""Replacement of a secret wherever a conf is shown."""
SECRET_PARTS = (
    *("secret", "passw", "passphrase", "token", "credential", "payload", "cookie", "jaas"),
    *("authorization", "signature", "keytab", "bearer", "webhook"),
    *("private key", "access key", "api key", "account key", "signing key", "encryption key"),
    *("shared key", "master key", "key pem", "ssl key"),
)
"""Parts of the names of secrets, in any case. A blank is any of ``.``, ``_``, ``-``, or nothing."""
SECRET_WORDS = ("pwd", "pin", "auth", "private")
"""Words at the end of the names of secrets, after any character that is not a letter."""
HARMLESS_ENDS = (
    *("secs", "ms", "file", "path", "count", "size", "bytes", "ttl", "enable", "enabled"),
)
"""Last words of names whose values are not secret, such as ``db.passwd.file``."""


def _telltale() -> re.Pattern[str]:
    """Pattern of the names of secrets."""
    parts = "|".join(part.replace(" ", "[._-]?") for part in SECRET_PARTS)
    words = "|".join(SECRET_WORDS)
    # A keystore's address is not a key.
    return re.compile(f"(?:{parts})(?!store)|(?<![a-z])(?:{words})$", re.IGNORECASE)


_TELLTALE = _telltale()
_HARMLESS = re.compile(f"[._-](?:{'|'.join(HARMLESS_ENDS)})$", re.IGNORECASE)
# Parts of a text that look like a password or a key.
_IN_TEXT = re.compile(
    # User and password in an address, options of a Spark or database address, headers, webhooks,
    # AWS and GitHub keys.
    r"(?P<login>(?<=://)[^/?#\s]*@)"
    r"|(?P<option>(?:[;?&]|--)(?:[a-z_.-]*(?:token|password|passwd|pwd|secret|authorization|key))=)"
    r"[^;&\s\"']+"
    r"|(?P<header>\b(?:Bearer|Basic)\s+)[A-Za-z0-9+/=._~-]{8,}"
    r"|(?P<hook>\bhooks\.slack\.com/services/|\bdiscord(?:app)?\.com/api/webhooks/"
    r"|\bwebhook\.office\.com/)[^\s\"']+"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}",
    re.IGNORECASE,
)


def is_secret_key(key: object) -> bool:
    """True if the value of a key or environment variable must be hidden.

    The table says it of the keys that the system knows. Others are judged by parts of their names.
    """
    name = str(key)
    conf_key = CONF_KEYS.get(name)
    if conf_key is not None:
        return conf_key.secret
    return bool(_TELLTALE.search(name) and not _HARMLESS.search(name))


def mask_text(text: str) -> str:
    """Replace the parts of a text that look like a password."""
    return _IN_TEXT.sub(_mask_match, text)


def _mask_match(match: re.Match[str]) -> str:
    if match["login"]:
        return HIDDEN + "@"
    prefix = match["option"] or match["header"] or match["hook"] or ""
    return prefix + HIDDEN


def mask(value: Any, key: object = "") -> Any:
    """Copy ``value`` without secrets, at any depth.

    ``key`` is that of the value, if it is one of a map. The value of a secret's key is replaced,
    unless it is empty or a boolean; of a map, all members that are not empty. In other text, the
    parts that look like a password are replaced.
    """
    if isinstance(value, Mapping):
        is_secret = is_secret_key(key)
        return {
            name: HIDDEN if is_secret and item else mask(item, name) for name, item in value.items()
        }
    if is_secret_key(key) and value and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, list | tuple):
        return _mask_list(value)
    return mask_text(value) if isinstance(value, str) else value


def _mask_list(items: Sequence[Any]) -> list[Any]:
    """Mask the items of a list, which may be the arguments of a command.

    The argument after an option such as ``--password`` is a secret.
    """
    masked: list[Any] = []
    option = ""
    for item in items:
        if option and isinstance(item, str) and item:
            masked.append(HIDDEN)
        else:
            masked.append(mask(item))
        is_option = isinstance(item, str) and item.startswith("-") and "=" not in item
        option = item if is_option and is_secret_key(item.lstrip("-")) else ""
    return masked


OWNED_PREFIXES = ("topology.", "storm.", "nimbus.", "supervisor.", "worker.")
"""An unknown key below these is a mistake; all other prefixes belong to the user."""

Kind = Literal["int", "number", "bool", "str", "list[str]", "list[int]", "map", "list[map]", "path"]
Setter = Literal["cluster", "administrator", "user"]


@dataclass(frozen=True)
class ConfKey:
    """One known key.

    ``null`` is allowed exactly when the shipped default is null.
    """

    kind: Kind
    doc: str
    default: Any
    minimum: float | None = None
    maximum: float | None = None
    choices: Collection[str] = ()
    """Valid values; empty: all of the kind."""
    setter: Setter = field(kw_only=True)
    """Conf that may set it: the cluster's alone, an administrator's topology, or any topology."""
    worker: bool = field(kw_only=True)
    """True if workers read it, so that supervisors hand them the cluster's value."""
    secret: bool = False
    """True if its value is never shown, logged, or given on a command line."""


_KINDS: dict[Kind, tuple[str, Any]] = {
    "int": ("an integer", int),
    "number": ("a finite number", int | float),
    "bool": ("true or false", bool),
    "str": ("a string", str),
    "path": ("a path", str),
    "list[str]": ("a list of strings", list | tuple),
    "list[int]": ("a list of integers", list | tuple),
    "map": ("a map", dict),
    "list[map]": ("a list of maps", list | tuple),
}
"""Kind -> its name for people, and its types in Python."""
# Kind of a list -> kind of its elements.
_INNER: dict[Kind, Kind] = {"list[str]": "str", "list[int]": "int", "list[map]": "map"}


def _is_kind(kind: Kind, value: Any) -> bool:
    """True if the value is of the kind; a boolean is not a number."""
    if isinstance(value, bool):
        return kind == "bool"
    _, types = _KINDS[kind]
    if kind == "bool" or not isinstance(value, types):
        return False
    if kind == "number":
        # A time that is NaN or infinite would never pass.
        return math.isfinite(value)
    if kind == "map":
        return all(isinstance(key, str) for key in value)
    inner_kind = _INNER.get(kind)
    return inner_kind is None or all(_is_kind(inner_kind, item) for item in value)


def check_value(key: str, value: Any) -> str | None:
    """Reason why ``value`` is not valid for the known ``key``.

    ``None`` if it is valid.
    """
    spec = CONF_KEYS[key]
    if not _is_kind(spec.kind, value):
        kind_name, _ = _KINDS[spec.kind]
        text = HIDDEN if is_secret_key(key) else f"{value!r:.60}"
        return f"{key} must be {kind_name}, got {text} ({type(value).__name__})"
    if spec.minimum is not None and value < spec.minimum:
        return f"{key} must be at least {spec.minimum:g}, got {value!r}"
    if spec.maximum is not None and value > spec.maximum:
        return f"{key} must be at most {spec.maximum:g}, got {value!r}"
    if spec.choices and value not in spec.choices:
        return f"{key} must be one of {', '.join(spec.choices)}, got {value!r:.60}"
    return None


# Key -> its row of the file: the fields of ConfKey, with the kind as "type".
_ROWS = load_table(__name__, "conf_keys")
_ROWS["topology.scheduler.strategy"]["choices"] = tuple(STRATEGIES)
CONF_KEYS: dict[str, ConfKey] = {key: ConfKey(row.pop("type"), **row) for key, row in _ROWS.items()}
"""Every known key, in the order of the file."""
SECRET_KEYS = frozenset(key for key, conf_key in CONF_KEYS.items() if conf_key.secret)
"""Known keys whose values are secrets."""


Conf = Mapping[str, Any]
# Beginnings of the names of classes in the confs of Storm and JStorm.
_JAVA_CLASSES = ("org.apache.storm.", "backtype.storm.", "com.alibaba.jstorm.")


def default_conf() -> dict[str, Any]:
    """A fresh copy of the shipped defaults."""
    return {key: conf_key.default for key, conf_key in CONF_KEYS.items()}


@functools.cache
def keys_without_meaning() -> dict[str, str]:
    """Keys of Storm and JStorm that are ignored, each with the reason.

    ``a.b.*`` is a family of keys.
    """
    reasons: dict[str, str] = {}
    for group in load_table(__name__, "storm_keys"):
        reasons.update(dict.fromkeys(group["keys"], group["reason"]))
    return reasons


def _reason_to_ignore(key: str, *, submitted: bool) -> str | None:
    """Reason to ignore a key; ``None`` if it is not ignored."""
    # A topology's conf may have keys below other prefixes, which its code reads.
    if key in CONF_KEYS or (submitted and not key.startswith(OWNED_PREFIXES)):
        return None
    reasons = keys_without_meaning()
    if key in reasons:
        return reasons[key]
    prefix = key
    while "." in prefix:
        prefix = prefix.rpartition(".")[0]
        family = f"{prefix}.*"
        if family in reasons:
            return reasons[family]
    return None


def unknown_keys(conf: Conf) -> dict[str, str]:
    """Unknown keys below an owned prefix -> a sentence with the nearest key, if any.

    Keys of Storm and JStorm that are ignored are left out.
    """
    sentences: dict[str, str] = {}
    for key in conf:
        if key in CONF_KEYS or not key.startswith(OWNED_PREFIXES):
            continue
        if _reason_to_ignore(key, submitted=False):
            continue
        # Only an unknown key needs it.
        from difflib import get_close_matches

        nearest = get_close_matches(key, CONF_KEYS, n=1, cutoff=0.6)
        if nearest:
            hint = f"did you mean {nearest[0]!r}?"
        else:
            hint = "remove it, or use a prefix of your own"
        sentences[key] = f"conf key {key!r} is not known: {hint}"
    return sentences


def _reason_to_drop(key: str, value: Any, *, submitted: bool) -> str | None:
    """Reason to drop the value of a known key.

    ``None`` if it is to be checked.
    """
    if isinstance(value, str) and value.startswith(_JAVA_CLASSES):
        return f"a Java class cannot be used, {CONF_KEYS[key].default!r} is"
    if key == "isolation.scheduler.machines" and isinstance(value, Mapping) and not submitted:
        return "numbers of machines choose no hosts: list hosts in a topology's conf"
    return None


def validate_conf(
    conf: Any, *, source: str, unknown: Literal["error", "warn"] = "error", submitted: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Check a conf: the values that are left, and warnings.

    Values that are classes of Storm or JStorm are left out. So are removed keys
    (:data:`~storm_dagster.model.removed_keys.REMOVED_KEYS`), each with a warning; the value of a
    renamed key counts under its new name.

    ``unknown`` is ``"error"`` (command line, YAML, plan files) or ``"warn"`` (Thrift). Raises
    :class:`InvalidRequest` that names every wrong key at once, and ``source``. Of a ``submitted``
    conf (a topology's or a component's) null under a key with a default means "not set", and the
    error is :class:`InvalidTopology`.
    """
    failure = InvalidTopology if submitted else InvalidRequest
    if not isinstance(conf, Mapping):
        hint = ": send a JSON object" if submitted else ""
        raise failure(
            f"{source}: the conf must be a map of keys to values, got {type(conf).__name__}{hint}"
        )
    conf, warnings = take_removed_keys(conf, source)
    problems = [f"conf key {key!r} must be a string" for key in conf if not isinstance(key, str)]
    unknown_sentences = unknown_keys({key: None for key in conf if isinstance(key, str)}).values()
    if unknown == "error":
        problems += unknown_sentences
    else:
        warnings += unknown_sentences
    checked: dict[str, Any] = {}
    ignored: defaultdict[str, list[str]] = defaultdict(list)
    for key, value in conf.items():
        reason = None
        if isinstance(key, str):
            reason = _reason_to_ignore(key, submitted=submitted)
        if reason:
            ignored[reason].append(key)
        elif key in CONF_KEYS and not (value is None and CONF_KEYS[key].default is None):
            if value is None and submitted:
                # Not set.
                continue
            reason = _reason_to_drop(key, value, submitted=submitted)
            if reason:
                ignored[reason].append(key)
                continue
            # A JSON writer may write the integer 3 as 3.0.
            if CONF_KEYS[key].kind == "int" and isinstance(value, float) and value.is_integer():
                value = int(value)
            problem = check_value(key, value)
            if problem:
                problems.append(problem)
        checked[key] = value
    if problems:
        raise failure(f"{source}: " + "; ".join(problems))
    warnings += [
        f"{source}: {', '.join(keys)} ignored: {reason}" for reason, keys in ignored.items()
    ]
    return checked, warnings


def parse_assignments(pairs: Iterable[str], *, source: str = "--conf") -> dict[str, Any]:
    """Parse ``KEY=VALUE`` strings into a conf map.

    VALUE is read as YAML, so ``3`` is a number and ``[a, b]`` a list. ``source`` is the option in
    errors. :class:`InvalidRequest` for a string of another form, and for the key of a secret.
    """
    conf: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise InvalidRequest(f"{source} {key!r:.80} is not of the form KEY=VALUE")
        if key.strip() in SECRET_KEYS:
            raise InvalidRequest(
                f"{source} {key.strip()}: every user of the machine can read a command line: "
                "write it into storm.yaml, or use storm.secret.file"
            )
        try:
            conf[key.strip()] = load_yaml(text)
        except ValueError as error:
            raise InvalidRequest(
                f"{source} {key.strip()}: the value is not valid YAML: {error}"
            ) from None
    return conf


@dataclass(frozen=True, repr=False)
class ClusterConf:
    """A merged cluster conf and the origin of each value."""

    values: dict[str, Any]
    origins: dict[str, str]
    """Key -> the source of its value, such as ``-c``."""
    warnings: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` if the key is absent.

        A null is returned as ``None``.
        """
        return self.values.get(key, default)

    def __repr__(self) -> str:
        return f"ClusterConf({mask(self.values)!r})"

    def with_values(self, values: Conf, origin: str) -> "ClusterConf":
        """A copy in which ``values`` override, with this origin.

        :class:`InvalidRequest` if they are not valid.
        """
        checked, warnings = validate_conf(values, source=origin)
        return ClusterConf(
            {**self.values, **checked},
            {**self.origins, **dict.fromkeys(checked, origin)},
            (*self.warnings, *warnings),
        )


def seed_urls(conf: "ClusterConf") -> list[str]:
    """Base URLs of ``nimbus.seeds``.

    A seed is a ``host`` (at ``nimbus.http.port``), a ``host:port`` or a whole URL. A host alone is
    left out if that port is 0, which is any.
    """
    scheme = "https" if conf.get("storm.tls.ca") else "http"
    port = conf["nimbus.http.port"]
    urls: list[str] = []
    for seed in map(str, conf["nimbus.seeds"] or ()):
        if "://" in seed:
            urls.append(seed.rstrip("/"))
        # Colons inside of brackets belong to an IPv6 address.
        elif ":" in seed.rpartition("]")[2]:
            urls.append(f"{scheme}://{seed}")
        elif port:
            urls.append(f"{scheme}://{seed}:{port}")
    return urls
