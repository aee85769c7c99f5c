"""Storm's blob methods.

Every caller that reaches the port may use them, as without Storm's security. Blobs of the system
are excluded: uploads (knowing the name of one is the right to use it), staged submissions and
events for Dagster are neither listed nor read, and the code of a topology that exists is neither
replaced nor deleted.
"""

from typing import Any

from storm_dagster.model.errors import KeyNotFound
from storm_dagster.model.event_log import is_batch_key
from storm_dagster.model.names import check_blob_key, id_of_blob_key
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.thrift.idl import KeyExists, RefusedCall, load_idl
from storm_dagster.nimbus.thrift.summaries import Summaries, version_number
from storm_dagster.nimbus.thrift.transfers import Downloads, UploadSessions

_INTERNAL = ("upload.", "staging.", "staging-of.")
"""Prefixes of the keys of the system's blobs."""
_PAGE = 100
"""Number of keys in one response of :meth:`Blobs.list`."""
_READ_WRITE_ADMIN = 7
"""Storm's bits of all rights: read (1), write (2), admin (4)."""


def _is_internal(key: str) -> bool:
    """True for a blob of the system, apart from those of topologies."""
    return key.startswith(_INTERNAL) or is_batch_key(key)


class Blobs:
    """The blob methods of one nimbus."""

    def __init__(self, nimbus: Nimbus, summaries: Summaries, downloads: Downloads) -> None:
        self._nimbus = nimbus
        self._summaries = summaries
        self._downloads = downloads
        self.uploads = UploadSessions(nimbus, "blob upload")

    def begin_create(self, key: str | None, meta: Any) -> str:
        """Begin a session that creates ``key``; :class:`KeyExists` if it exists."""
        checked = self._writable(key)
        _check_acl(meta)
        if self._nimbus.blobs.exists(checked):
            raise KeyExists(f"blob {checked!r} exists already: update it, or choose another key")
        return self.uploads.begin(checked)

    def begin_update(self, key: str | None) -> str:
        """Begin a session that replaces ``key``.

        Readers get the old content until the session is finished.
        """
        checked = self._writable(key)
        self._nimbus.blobs.meta(checked)
        return self.uploads.begin(checked)

    def meta(self, key: str | None) -> Any:
        """Return a ReadableBlobMeta, by which every user has all rights."""
        idl = load_idl()
        checked = _visible(key)
        meta = self._nimbus.blobs.meta(checked)
        all_users = idl.AccessControl(
            type=idl.AccessControlType.OTHER, name="", access=_READ_WRITE_ADMIN
        )
        settable = idl.SettableBlobMeta(
            acl=[all_users], replication_factor=self.replication(checked)
        )
        return idl.ReadableBlobMeta(settable=settable, version=version_number(meta))

    def set_meta(self, key: str | None, meta: Any) -> None:
        """Accept a description that agrees with the blob.

        Rights of single users and another number of copies are refused.
        """
        checked = self._writable(key)
        self._nimbus.blobs.meta(checked)
        _check_acl(meta)
        copies = meta.replication_factor if meta is not None else None
        if copies is not None and copies > 0 and copies != self.replication(checked):
            raise _replication_not_settable(checked)

    def begin_download(self, key: str | None) -> Any:
        """Begin a download; return a BeginDownloadResult."""
        session, meta = self._downloads.begin(_visible(key))
        return load_idl().BeginDownloadResult(
            version=version_number(meta), session=session, data_size=meta.size
        )

    def delete(self, key: str | None) -> None:
        """Delete a blob; :class:`RefusedCall` for the code of a topology that exists."""
        self._nimbus.blobs.delete(self._writable(key))

    def list(self, session: str | None) -> Any:
        """Return a ListBlobsResult with the next hundred keys.

        The session is the last key that was returned, empty at first: it takes no memory and never
        expires. A page without keys is the end.
        """
        keys = sorted(key for key in self._nimbus.blobs.keys("") if not _is_internal(key))
        if session:
            keys = [key for key in keys if key > session]
        page = keys[:_PAGE]
        next_session = page[-1] if page else session or ""
        return load_idl().ListBlobsResult(keys=page, session=next_session)

    def replication(self, key: str | None) -> int:
        """Return the number of nimbuses that hold the blob."""
        checked = _visible(key)
        self._nimbus.blobs.meta(checked)
        return self._summaries.copies(checked)

    def update_replication(self, key: str | None, copies: int | None) -> int:
        """Return the number of copies if it is ``copies``.

        Another number is refused, as by Storm's local store.
        """
        checked = self._writable(key)
        current_copies = self.replication(checked)
        if copies != current_copies:
            raise _replication_not_settable(checked)
        return current_copies

    def register(self, key: str | None) -> None:
        """Return if the blob is stored, which registers it; else :class:`KeyNotFound`."""
        self._nimbus.status.require()
        self._nimbus.blobs.meta(_visible(key))

    def exists(self, key: str | None) -> bool:
        """Return True if this nimbus has the blob."""
        return self._nimbus.blobs.exists(_visible(key))

    def _writable(self, key: str | None) -> str:
        """Return a valid key that callers may write.

        :class:`NotLeading` at a follower, :class:`RefusedCall` for blobs of the system and for the
        code of a topology that exists.
        """
        self._nimbus.status.require()
        checked = check_blob_key(key)
        if _is_internal(checked):
            raise RefusedCall(
                f"blob key {checked!r:.80} belongs to the system: choose another prefix"
            )
        owner = id_of_blob_key(checked)
        if owner is not None and owner in self._nimbus.cluster.active_storms():
            raise RefusedCall(
                f"blob {checked!r} is the code of topology {owner}, which exists: "
                "kill or update the topology"
            )
        return checked


def _replication_not_settable(key: str) -> RefusedCall:
    return RefusedCall(
        f"the number of copies of blob {key!r} is decided by topology.min.replication.count and "
        "the nimbuses that run: it is not set for one blob"
    )


def _visible(key: str | None) -> str:
    """Return a valid key; :class:`KeyNotFound` for blobs of the system."""
    checked = check_blob_key(key)
    if _is_internal(checked):
        # The same words as for a key that does not exist: callers must not learn which uploads
        # exist.
        raise KeyNotFound(f"blob {checked!r:.80} does not exist: list the keys with listBlobs")
    return checked


def _check_acl(meta: Any) -> None:
    """Raise :class:`RefusedCall` for rights that would not be enforced."""
    idl = load_idl()
    entries = (meta.acl if meta is not None else None) or ()
    for entry in entries:
        is_user = entry.type == idl.AccessControlType.USER
        if is_user and (entry.access or 0) != _READ_WRITE_ADMIN:
            raise RefusedCall(
                f"access {entry.access} of user {entry.name!r:.80} would not be enforced: "
                "blobs here are open to every client that reaches nimbus; leave out the list of "
                "rights"
            )
