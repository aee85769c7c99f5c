"""Grammar of the names of topologies, components, streams, code and blobs.

The rules are JStorm's, a little stricter (``docs/decisions.md#ids-and-names``). Names travel into
ZooKeeper paths, file names, Dagster partition keys and web pages, so everything is an allow-list.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

from storm_dagster.model.errors import InvalidRequest, InvalidTopology

# Components that the cluster adds to topologies, and the sender of its own tuples.
ACKER = "__acker"
TOPOLOGY_MASTER = "__topology_master"
SYSTEM = "__system"

AWAITED_METRIC = "what it waits for"
"""Metric of a task whose other system is away, with its name and cause; empty if none is."""

SLOW_CALLS = "slow calls"
"""Activity of the error of a component whose calls take most of its worker's loop."""

_TOPOLOGY_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
INVISIBLE = "\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\u061c"
"""Characters without a width and marks of direction, for a class of a pattern: a text with them is
not what it looks like.
"""
_COMPONENT_ID = re.compile(r"[A-Za-z0-9\-_/.$<>()#:]{1,200}")
_TOPOLOGY_ID = re.compile(
    r"(?P<name>[A-Za-z0-9._-]{1,200})-(?P<count>[0-9]{1,12})-(?P<secs>[0-9]{1,12})"
)
_LIKE_AN_ID = re.compile(r".*-[0-9]{1,12}-[0-9]{9,12}")
"""Names that could be ids. ``sales-2026-11`` is not one, since no clock is in the year 1970."""
# A topology id ends in its seconds: a number after a last dot can only be a version of its code.
_CODE_BLOB = re.compile(
    rf"(?P<code_dir>(?P<id>{_TOPOLOGY_ID.pattern})(\.[0-9]{{1,12}})?)"
    r"-(stormjar\.jar|stormconf\.ser|stormcode\.ser|placement\.json)"
)
_BLOB_KEY = re.compile(r"[\w .:\-]{1,255}", re.ASCII)
_API = "storm_dagster.api"
FORMER_MODULES = {
    f"{_API}.spark_bolt": f"{_API}.spark.bolt",
    f"{_API}.spark_fused": f"{_API}.spark.fused",
    f"{_API}.spark_query": f"{_API}.spark.query",
}
"""Modules of components that topologies of earlier releases name -> modules of this release."""


def url_host(host: str) -> str:
    """A host in the form that URLs and ``host:port`` have: an IPv6 address is in brackets."""
    return f"[{host}]" if ":" in host else host


def check_topology_name(name: object, *, is_new: bool = True) -> str:
    """The name of a topology, checked.

    Without ``is_new`` the first character may be any: a topology that an earlier release accepted
    keeps its name when its code is replaced. :class:`InvalidTopology` names the reason.
    """
    checked_name = check_topology_reference(name)
    if is_new and not checked_name[0].isalnum():
        # With '-' it would be an option of a command that is given the name.
        raise InvalidTopology(
            f"topology name {checked_name!r} must begin with a letter or digit: rename it"
        )
    if _LIKE_AN_ID.fullmatch(checked_name):
        raise InvalidTopology(
            f"topology name {checked_name!r} looks like a topology id (<name>-<number>-<seconds>):"
            " rename it"
        )
    return checked_name


def check_topology_reference(name: object) -> str:
    """The name or id of a topology, checked: it cannot express a path."""
    if not isinstance(name, str) or not name:
        raise InvalidTopology(
            "the topology has no name: give one with --name, of letters, digits, '-', '_' and '.'"
        )
    if len(name) > 200:
        raise InvalidTopology(
            f"topology name {name[:20]!r}... has {len(name)} characters: shorten it to at most 200"
        )
    if not _TOPOLOGY_NAME.fullmatch(name):
        raise InvalidTopology(
            f"topology name {name!r} may hold only letters, digits, '-', '_' and '.': rename it"
        )
    if name.isdigit() or name.lower() == "null" or name in (".", ".."):
        raise InvalidTopology(
            f"topology name {name!r} is reserved (digits only, 'null', '.' and '..' are): rename it"
        )
    return name


def check_component_id(component_id: object, kind: str = "component") -> str:
    """A user's component id, checked against JStorm's character set.

    A leading ``__`` is refused.
    """
    if not isinstance(component_id, str) or not _COMPONENT_ID.fullmatch(component_id):
        raise InvalidTopology(
            f"{kind} id {component_id!r} may hold 1 to 200 letters, digits and any of"
            " -_/.$<>()#: : rename it"
        )
    if component_id.startswith("__"):
        raise InvalidTopology(
            f"{kind} id {component_id!r} starts with '__', which belongs to the system: rename it"
        )
    return component_id


def check_stream_id(stream_id: object) -> str:
    """A user's stream id, checked by the same rule as component ids."""
    return check_component_id(stream_id, "stream")


def code_name(target: Any, subject: str) -> str:
    """``"module:QualName"`` of a class or function that a worker can import.

    A component of this library is named by its public package, which each release has.
    :class:`InvalidTopology` for a lambda, a definition inside a function, and a definition in
    ``__main__``: a worker could not import them.
    """
    if isinstance(target, str):
        module, colon, name = target.partition(":")
        if not (module and colon and name):
            raise InvalidTopology(f"{subject} {target!r} must be of the form 'module:name'")
    else:
        module = getattr(target, "__module__", None)
        name = getattr(target, "__qualname__", None)
        if not module or not name:
            raise InvalidTopology(
                f"{subject} {target!r:.80} must be a class or function of a module"
            )
        if module.startswith(f"{_API}.") and getattr(sys.modules.get(_API), name, None) is target:
            module = _API
    return check_importable(f"{module}:{name}", subject)


def check_importable(name: str, subject: str) -> str:
    """``"module:QualName"``, checked.

    :class:`InvalidTopology` if a worker cannot import it.
    """
    if "<lambda>" in name or "<locals>" in name:
        raise InvalidTopology(
            f"{subject}: {name!r} is a lambda or defined inside a function, so that no worker can"
            " import it: move it to the top level of its module"
        )
    if name.startswith("__main__:"):
        raise InvalidTopology(
            f"{subject}: {name!r} exists only in the script that was started: "
            "submit the file as a TARGET, or move it to a module that can be imported"
        )
    return name


def make_topology_id(name: str, count: int, epoch_secs: int) -> str:
    """``<name>-<n>-<epoch secs>``, the id of one deployment of a topology."""
    return f"{check_topology_reference(name)}-{count}-{epoch_secs}"


def topology_name_of(topology_id: str) -> str:
    """The name in a topology id; :class:`InvalidRequest` for other text."""
    match = _TOPOLOGY_ID.fullmatch(topology_id)
    if not match:
        raise InvalidRequest(
            f"{topology_id!r} is not a topology id of the form <name>-<number>-<seconds>"
        )
    return match["name"]


def make_code_dir(topology_id: str, number: int) -> str:
    """Blob key prefix of a later version of a topology's code.

    The prefix of the first version is the topology id.
    """
    return f"{topology_id}.{number}"


def _key_with(suffix: str) -> Callable[[str], str]:
    return lambda code_dir: f"{code_dir}{suffix}"


jar_key = _key_with("-stormjar.jar")
"""Blob key of the archive of a topology's code."""
conf_key = _key_with("-stormconf.ser")
"""Blob key of the normalized conf (JSON)."""
code_key = _key_with("-stormcode.ser")
"""Blob key of the normalized topology (JSON)."""
placement_key = _key_with("-placement.json")
"""Blob key of the reasons for the placement of the topology of that id (JSON)."""


def code_keys(code_dir: str) -> tuple[str, str, str]:
    """Blob keys of archive, conf and topology of that code."""
    return jar_key(code_dir), conf_key(code_dir), code_key(code_dir)


def code_dir_of_blob_key(key: str) -> str | None:
    """Prefix of the code that a blob is part of; ``None`` for other blobs.

    It is ``<topology id>`` or ``<topology id>.<number>``.
    """
    match = _CODE_BLOB.fullmatch(key)
    return match["code_dir"] if match else None


def id_of_blob_key(key: str) -> str | None:
    """The topology id of a blob, or ``None`` for a blob of another kind."""
    match = _CODE_BLOB.fullmatch(key)
    return match["id"] if match else None


def check_blob_key(key: object) -> str:
    """A blob key, checked against Storm's character set.

    It cannot express a path. Storm's set also has the tab; ZooKeeper, where each blob is
    registered, refuses it in a name.
    """
    if not isinstance(key, str) or not _BLOB_KEY.fullmatch(key) or key in (".", ".."):
        raise InvalidRequest(
            f"blob key {key!r:.80} may hold 1 to 255 letters, digits, blanks and any of ._:- and "
            "not be '.' or '..'"
        )
    return key
