"""Storm's blob methods. Everybody who reaches the port may use them, as without Storm's security.

What belongs to the system is not handed out: uploads (their names are what entitles to use them)
and staged submissions are neither listed nor read, and the code of a topology that exists is
neither replaced nor deleted.
"""

from typing import Any

from storm_dagster.model.errors import KeyNotFound
from storm_dagster.model.names import check_blob_key, id_of_blob_key
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.thrift.idl import KeyExists, RefusedCall, load_idl
from storm_dagster.nimbus.thrift.summaries import Summaries, version_number
from storm_dagster.nimbus.thrift.transfers import Downloads, UploadSessions

_INTERNAL = ("upload.", "staging.", "staging-of.")
_PAGE = 100
_READ_WRITE_ADMIN = 7


class Blobs:
    """The blob methods of one nimbus."""

    def __init__(self, nimbus: Nimbus, summaries: Summaries, downloads: Downloads) -> None:
        self._nimbus = nimbus
        self._summaries = summaries
        self._downloads = downloads
        self.uploads = UploadSessions(nimbus, "blob upload")

    def begin_create(self, key: str | None, meta: Any) -> str:
        """A session that creates ``key``; :class:`KeyExists` when it is there."""
        checked = self._writable(key)
        _check_acl(meta)
        if self._nimbus.blobs.exists(checked):
            raise KeyExists(f"blob {checked!r} exists already: update it, or choose another key")
        return self.uploads.begin(checked)

    def begin_update(self, key: str | None) -> str:
        """A session that replaces ``key``; readers see the old content until it is finished."""
        checked = self._writable(key)
        self._nimbus.blobs.meta(checked)
        return self.uploads.begin(checked)

    def meta(self, key: str | None) -> Any:
        """A ReadableBlobMeta. Everybody may do everything: there are no users."""
        idl = load_idl()
        checked = _visible(key)
        meta = self._nimbus.blobs.meta(checked)
        everybody = idl.AccessControl(
            type=idl.AccessControlType.OTHER, name="", access=_READ_WRITE_ADMIN
        )
        settable = idl.SettableBlobMeta(
            acl=[everybody], replication_factor=self.replication(checked)
        )
        return idl.ReadableBlobMeta(settable=settable, version=version_number(meta))

    def set_meta(self, key: str | None, meta: Any) -> None:
        """Accept what is so already; access of single users and another number of copies are
        refused.
        """
        checked = self._writable(key)
        self._nimbus.blobs.meta(checked)
        _check_acl(meta)
        wanted = meta.replication_factor if meta is not None else None
        if wanted is not None and wanted > 0 and wanted != self.replication(checked):
            self._refuse_replication(checked)

    def begin_download(self, key: str | None) -> Any:
        """A BeginDownloadResult."""
        session, meta = self._downloads.begin(_visible(key))
        return load_idl().BeginDownloadResult(
            version=version_number(meta), session=session, data_size=meta.size
        )

    def delete(self, key: str | None) -> None:
        """Delete a blob; :class:`RefusedCall` for the code of a topology that exists."""
        self._nimbus.blobs.delete(self._writable(key))

    def list(self, session: str | None) -> Any:
        """A ListBlobsResult: the next hundred keys. The session is the last key: it takes no memory
        and never expires.
        """
        keys = sorted(key for key in self._nimbus.blobs.keys("") if not key.startswith(_INTERNAL))
        page = [key for key in keys if not session or key > session][:_PAGE]
        return load_idl().ListBlobsResult(keys=page, session=page[-1] if page else session or "")

    def replication(self, key: str | None) -> int:
        """How many nimbuses hold it."""
        checked = _visible(key)
        self._nimbus.blobs.meta(checked)
        return self._summaries.copies(checked)

    def update_replication(self, key: str | None, wanted: int | None) -> int:
        """Nothing to do when there are as many copies already; else refused, as by Storm's local
        store.
        """
        checked = self._writable(key)
        now = self.replication(checked)
        if wanted != now:
            self._refuse_replication(checked)
        return now

    def register(self, key: str | None) -> None:
        """createStateInZookeeper: a blob that was stored is registered; :class:`KeyNotFound` when
        it was not.
        """
        self._nimbus.status.require()
        self._nimbus.blobs.meta(_visible(key))

    def exists(self, key: str | None) -> bool:
        """Whether this nimbus has it."""
        return self._nimbus.blobs.exists(_visible(key))

    def _writable(self, key: str | None) -> str:
        self._nimbus.status.require()
        checked = check_blob_key(key)
        if checked.startswith(_INTERNAL):
            raise RefusedCall(
                f"blob key {checked!r:.80} belongs to the system: choose another prefix"
            )
        owner = id_of_blob_key(checked)
        if owner is not None and owner in self._nimbus.cluster.active_storms():
            raise RefusedCall(
                f"blob {checked!r} is the code of topology {owner}, which exists: kill or update the topology"
            )
        return checked

    def _refuse_replication(self, key: str) -> None:
        raise RefusedCall(
            f"the number of copies of blob {key!r} is decided by topology.min.replication.count and the nimbuses that run: "
            "it is not set for one blob"
        )


def _visible(key: str | None) -> str:
    checked = check_blob_key(key)
    if checked.startswith(_INTERNAL):
        # The same words as for a key that does not exist: nobody learns which uploads there are.
        raise KeyNotFound(f"blob {checked!r:.80} does not exist: list the keys with listBlobs")
    return checked


def _check_acl(meta: Any) -> None:
    """Rights that are not kept must not be promised."""
    idl = load_idl()
    for entry in (meta.acl if meta is not None else None) or ():
        if entry.type == idl.AccessControlType.USER and (entry.access or 0) != _READ_WRITE_ADMIN:
            raise RefusedCall(
                f"access {entry.access} of user {entry.name!r:.80} would not be enforced: blobs here are open to whoever reaches "
                "nimbus; leave the list of rights out"
            )
