"""Asset events that components report to Dagster.

They are validated where they are made, and a second time by nimbus.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from storm_dagster.model.errors import InvalidRequest

MAX_METADATA_BYTES = 16_384
"""Largest size of an event's metadata as JSON."""
# Field -> its longest text.
_MAX_CHARACTERS = {"key": 512, "partition": 512, "data_version": 256, "description": 2048}
# Names of checks that Dagster accepts.
_CHECK = re.compile(r"[A-Za-z0-9_]{1,128}")
_ID = re.compile(r"[0-9a-f]{32}")
# Control characters, and halves of characters.
_CONTROL = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_LONE = re.compile("[\ud800-\udfff]")
"""Halves of characters, which UTF-8 cannot hold."""
_MIN_INT = -(1 << 63)
_MAX_INT = (1 << 64) - 1
"""Whole numbers that a request to nimbus can hold."""
_MAX_DEPTH = 8
"""Levels of lists and maps in metadata."""
TARGET_PART = "@target"
"""First part of the key of a sink's report on its table; keys of users never begin with it.

The next part is the component, the others are the asset that the component writes. The code
location that declares the topology translates the key.
"""

ASSETS_KEY = "topology.component.assets"
"""Conf key of a component: the assets that it declares."""
ASSET_METADATA_KEY = "topology.component.asset.metadata"
"""Conf key of a bolt: asset -> metadata, or null for one that is defined elsewhere."""


def written_assets(conf: Mapping[str, Any]) -> list[str]:
    """Assets that a bolt writes, by its conf; each has a key below that of the bolt.

    Left out are assets that are defined elsewhere, on which the bolt only reports.
    """
    metadata = conf.get(ASSET_METADATA_KEY) or {}
    return [path for path in conf.get(ASSETS_KEY) or () if metadata.get(path, {}) is not None]


def target_key(component: str, asset: str) -> list[str]:
    """Key of a report of ``component`` on an asset that it writes, such as ``postgres/orders``."""
    return [TARGET_PART, component, *asset.split("/")]


def is_target_key(key: Sequence[str]) -> bool:
    """True if the key is that of a sink's report, and not one of users."""
    return len(key) > 2 and key[0] == TARGET_PART


class DagsterEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One materialization, observation or check of an asset.

    :meth:`make` checks it.
    """

    id: str
    """32 hex digits of topology, component and contents; an event that is repeated keeps them."""
    kind: Literal["materialization", "observation", "check"]
    key: tuple[str, ...]
    partition: str | None = None
    metadata: dict[str, Any] = {}
    description: str | None = None
    data_version: str | None = None
    check: str | None = None
    """Name of a check."""
    passed: bool | None = None
    severity: Literal["ERROR", "WARN"] = "ERROR"

    @property
    def asset(self) -> str:
        """The key as people write it: ``lake/clicks``."""
        return "/".join(self.key)

    @staticmethod
    def make(origin: str, kind: Any, key: str | Sequence[str], **fields: Any) -> "DagsterEvent":
        """A checked event of ``origin`` (topology and component).

        A field that is ``None`` counts as left out. Scalars of numpy become plain numbers.
        :class:`InvalidRequest` for values that Dagster refuses.
        """
        subject = f"{kind} of asset {key!r:.100}"
        parts = _parts_of_key(subject, key)
        values = {name: _scalar(value) for name, value in fields.items() if value is not None}
        for name, value in {**values, "key": "/".join(parts)}.items():
            _check_text(subject, name, value)
        if kind == "check":
            _check_result(subject, values, fields)
        if values.get("severity", "ERROR") not in ("ERROR", "WARN"):
            raise InvalidRequest(
                f"{subject}: severity must be 'ERROR' or 'WARN', got {values['severity']!r:.100}"
            )
        values["metadata"] = _plain_metadata(subject, values.pop("metadata", {}))
        contents = json.dumps([origin, kind, parts, values], sort_keys=True, separators=(",", ":"))
        # Of the contents, so that a replayed tuple reports an event with the same id.
        number = hashlib.sha256(contents.encode()).hexdigest()[:32]
        return DagsterEvent(id=number, kind=kind, key=tuple(parts), **values)


def _parts_of_key(subject: str, key: str | Sequence[str]) -> list[str]:
    """The parts of an asset's key; :class:`InvalidRequest` if it is not a key."""
    parts: list[Any] = []
    if isinstance(key, str):
        parts = key.split("/")
    elif isinstance(key, list | tuple):
        parts = [*key]
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise InvalidRequest(
            f"{subject}: the key must be a string such as 'lake/clicks', or a list of its parts"
        )
    return parts


def _check_result(subject: str, values: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Check name and result of an asset check; errors show the ``fields`` as they came."""
    if not _CHECK.fullmatch(str(values.get("check"))):
        raise InvalidRequest(
            f"{subject}: a check's name has letters, digits and _ only:"
            f" {fields.get('check')!r:.100}"
        )
    if not isinstance(values.get("passed"), bool):
        raise InvalidRequest(
            f"{subject}: passed must be True or False, got {fields.get('passed')!r:.100}"
        )


def _plain_metadata(subject: str, metadata: Any) -> dict[str, Any]:
    """A copy of the metadata in plain types of JSON, within its limit of bytes."""
    if not isinstance(metadata, Mapping):
        raise InvalidRequest(f"{subject}: metadata must be a map, got {metadata!r:.100}")
    copy = _plain(metadata, subject, "metadata", 0)
    size = len(json.dumps(copy).encode())
    if size > MAX_METADATA_BYTES:
        raise InvalidRequest(
            f"{subject}: its metadata has {size} bytes, the limit is {MAX_METADATA_BYTES}:"
            " write it to the lake, and give its path"
        )
    return copy


def _check_text(subject: str, name: str, value: Any) -> None:
    """Check the field if it is one of those that hold text."""
    max_characters = _MAX_CHARACTERS.get(name)
    if max_characters is None:
        return
    control = _LONE if name == "description" else _CONTROL
    is_valid = (
        isinstance(value, str)
        and 0 < len(value) <= max_characters
        and control.search(value) is None
    )
    if not is_valid:
        raise InvalidRequest(
            f"{subject}: {name} must be a string of 1 to {max_characters} characters without"
            f" control characters, got {value!r:.100} ({type(value).__name__})"
        )


def decode_event(document: Any) -> "DagsterEvent":
    """The event in a document of a worker, checked; it keeps its id.

    :class:`InvalidRequest` for other documents.
    """
    try:
        event = msgspec.convert(document, DagsterEvent)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"this is not a valid event: {error}") from None
    if not _ID.fullmatch(event.id):
        raise InvalidRequest(f"{event.id!r:.40} is not the id of an event: an id has 32 hex digits")
    # Without the first three: id, kind and key.
    fields = {name: getattr(event, name) for name in DagsterEvent.__struct_fields__[3:]}
    checked_event = DagsterEvent.make("", event.kind, event.key, **fields)
    return msgspec.structs.replace(checked_event, id=event.id)


def _scalar(value: Any) -> Any:
    """A scalar of numpy as a plain number; other values unchanged."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def _plain(value: Any, subject: str, place: str, depth: int) -> Any:
    """Copy a value of metadata in plain types of JSON.

    ``place`` is its path for errors, ``depth`` the number of levels around it.
    :class:`InvalidRequest` for a value that JSON cannot hold.
    """
    value = _scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and _MIN_INT <= value <= _MAX_INT:
        return int(value)
    if isinstance(value, str) and not _LONE.search(value):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [
            _plain(item, subject, f"{place}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
    if (
        depth < _MAX_DEPTH
        and isinstance(value, Mapping)
        and all(isinstance(key, str) and key and not _LONE.search(key) for key in value)
    ):
        return {
            key: _plain(item, subject, f"{place}[{key!r:.40}]", depth + 1)
            for key, item in value.items()
        }
    raise InvalidRequest(
        f"{subject}: {place} is {_shown(value)} ({type(value).__name__}), which JSON cannot hold: "
        "give"
        " strings without halves of characters, finite numbers of 64 bits, booleans, None, lists"
        f" or maps with strings as keys, at most {_MAX_DEPTH} deep (a datetime as .isoformat(),"
        " an array as .tolist(), a larger number as str())"
    )


def _shown(value: Any) -> str:
    """The beginning of the ``repr`` of a value, for an error."""
    try:
        return f"{value!r:.60}"
    except Exception:
        # A whole number that is too long for text, or a class of its own.
        return "a value without a text"
