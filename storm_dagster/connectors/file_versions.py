"""Versions of a file: what tells a replaced file from one that was appended to.

Object stores give each content an ETag. Elsewhere size, time, and a hash of the first bytes count.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, Literal

import msgspec

HEAD_BYTES = 4096
"""Maximum number of bytes at the beginning of a file that are hashed."""
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated")
"""Names of the time of the last modification, in the different file systems."""

Change = Literal["same", "appended", "replaced"]


class FileVersion(msgspec.Struct, frozen=True, omit_defaults=True):
    """Version of a file, as it is stored beside the position in it."""

    size: int | None = None
    """Bytes; of a file that was read to its end, those that were read."""
    time: float | None = None
    """Last modification, in seconds since 1970."""
    etag: str | None = None
    """Name of the content in an object store."""
    head_bytes: int | None = None
    """Number of bytes that ``head`` is the hash of; ``None``: not known yet."""
    head: str = ""
    rows: int | None = None
    """Records of a file that was read to its end; ``None`` of others, or not known."""
    lines: int = 0
    """Lines of a file of lines that was read to its end."""

    def has_identity(self) -> bool:
        """True if another version can be told from this one."""
        return self.etag is not None or self.head_bytes is not None


def listed_version(info: Mapping[str, Any]) -> FileVersion:
    """The version in the answer of a file system."""
    etag = info.get("ETag") or info.get("etag")
    return FileVersion(info.get("size"), _modified_secs(info), None if etag is None else str(etag))


def _modified_secs(info: Mapping[str, Any]) -> float | None:
    """Time of the last modification in seconds since 1970; ``None`` if unknown."""
    for key in _TIME_KEYS:
        modified = info.get(key)
        if modified:
            if hasattr(modified, "timestamp"):
                return modified.timestamp()
            return float(modified) if isinstance(modified, int | float) else None
    return None


def stored_version(identity: Any) -> FileVersion | None:
    """The version of a stored identity; ``None``: unknown."""
    try:
        return msgspec.convert(identity, FileVersion)
    except msgspec.ValidationError:
        return None


def hash_of(head: bytes) -> str:
    """Hash of the first bytes of a file."""
    return blake2b(head, digest_size=16).hexdigest()


def change_of(
    stored: FileVersion, listed: FileVersion, read_head: Callable[[int], bytes]
) -> Change:
    """Decide what has happened to a file since a version of it was read.

    ``read_head`` returns so many bytes of its beginning; it is called only if size or time differ.
    A file whose size and first bytes are the same is the same.
    """
    if stored.etag is not None and listed.etag is not None:
        return "same" if stored.etag == listed.etag else "replaced"
    if stored.size is None or listed.size is None or stored.head_bytes is None:
        return "same"
    if (stored.size, stored.time) == (listed.size, listed.time):
        return "same"
    if listed.size < stored.size or hash_of(read_head(stored.head_bytes)) != stored.head:
        return "replaced"
    return "appended" if listed.size > stored.size else "same"
