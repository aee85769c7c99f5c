"""Local code of a supervisor.

It is fetched from any nimbus, verified, unpacked, and removed when it is unused. Below
``HOME/supervisor/<id>``::

    stormdist/<code dir>/   stormjar.jar  stormconf.ser  stormcode.ser  code/  manifest.json
    cache/<sha256>          archives by content, so that none is fetched twice under two ids
    tmp/                    fetches in progress; emptied at start

A folder in ``stormdist`` is created by one rename, so that it is complete or absent.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from storm_dagster.host.files import read_json_object
from storm_dagster.model.errors import (
    Corrupt,
    InvalidRequest,
    InvalidTopology,
    KeyNotFound,
    StormDagsterError,
    Unavailable,
    error_text,
)
from storm_dagster.model.names import check_blob_key, code_key, conf_key, jar_key
from storm_dagster.packaging.unpack import UnpackLimits, hash_file, unpack_archive
from storm_dagster.security.settings import SILENT_SECS, Security

_log = logging.getLogger(__name__)

_PARTS = {"stormjar.jar": jar_key, "stormconf.ser": conf_key, "stormcode.ser": code_key}
"""File of a code folder -> function from the folder's name to the key of its blob."""
_MAX_RECORD_BYTES = 64 * 1024 * 1024
"""Largest conf and topology; an archive may have ``nimbus.upload.max.bytes``."""
_UNUSED_CACHE_SECS = 600.0
"""Time after which an archive that no code folder shares is removed from the cache."""


@dataclass(frozen=True)
class LocalCode:
    """A complete code folder."""

    path: Path
    sha256: str
    """SHA-256 of the archive."""


@dataclass(eq=False)
class Localizer:
    """Localizer of code in one supervisor's folder. Thread-safe."""

    folder: Path
    """``HOME/supervisor/<id>``."""
    sources: Callable[[], Sequence[str]]
    """Base URLs of the nimbuses, best first, for each round of tries."""
    conf: Mapping[str, Any]
    stop: threading.Event
    """Set when the supervisor stops: fetches in progress fail."""
    expected: Callable[[str], str | None] = lambda key: None
    """Blob key -> the SHA-256 that the leader recorded for the blob.

    ``None`` if it recorded none: the SHA-256 that the nimbus announces is believed then.
    """
    limits: UnpackLimits | None = None
    """Limits of an unpacked archive; ``None``: the default ones."""

    def __post_init__(self) -> None:
        self._dist = self.folder / "stormdist"
        self._cache = self.folder / "cache"
        self._tmp = self.folder / "tmp"
        self._max_bytes: int = self.conf["nimbus.upload.max.bytes"]
        """Largest archive."""
        self._moving = threading.Lock()
        """Held while a code folder is put in place, marked as incomplete or removed."""
        self._under_way: set[str] = set()
        """Names of the folders in ``tmp`` of the fetches in progress."""
        self.removing = False
        """True while :meth:`remove_unused` runs: code that looks complete may be removed soon."""
        idle_secs = min(SILENT_SECS, self.conf["nimbus.file.copy.expiration.secs"])
        timeout = httpx.Timeout(idle_secs, connect=min(5.0, idle_secs))
        options = Security.of(self.conf).client_options()
        # The hash of a blob is checked on the bytes that arrive: they must not be compressed.
        options["headers"] = {"Accept-Encoding": "identity"}
        self._http = httpx.Client(timeout=timeout, follow_redirects=False, **options)

    def prepare(self) -> None:
        """Create the folders, and remove incomplete fetches."""
        shutil.rmtree(self._tmp, ignore_errors=True)
        for folder in (self._dist, self._cache, self._tmp):
            folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Close the connections; fetches in progress fail."""
        self._http.close()

    def path_of(self, code_dir: str) -> Path:
        """Folder of that code.

        Raises :class:`InvalidRequest` for a name that is not a valid prefix of blob keys.
        """
        check_blob_key(code_dir)
        if code_dir.startswith("."):
            raise InvalidRequest(
                f"code {code_dir!r:.80} starts with '.', which no topology id does"
            )
        return self._dist / code_dir

    def local(self, code_dir: str) -> LocalCode | None:
        """The code, if it is complete on this disk; otherwise ``None``.

        Code with another hash than the leader recorded counts as incomplete. Raises
        :class:`InvalidRequest` as :meth:`path_of`.
        """
        path = self.path_of(code_dir)
        try:
            manifest = json.loads((path / "manifest.json").read_bytes())
            blobs = manifest["blobs"]
            if not isinstance(blobs["stormjar.jar"], str) or not (path / "code").is_dir():
                return None
            for part, key_of in _PARTS.items():
                if not (path / part).is_file():
                    return None
                if self.expected(key_of(code_dir)) not in (None, blobs[part]):
                    return None
            return LocalCode(path, blobs["stormjar.jar"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def distrust(self, code_dir: str) -> None:
        """Mark the code as incomplete, because a part of it is damaged.

        The next :meth:`fetch` replaces it.
        """
        with self._moving, suppress(OSError):
            (self.path_of(code_dir) / "manifest.json").unlink()

    def fetch(self, code_dir: str) -> LocalCode:
        """Fetch the code unless it is on this disk.

        It takes at most ``supervisor.blobstore.download.max_retries`` rounds over all nimbuses.
        Raises :class:`Unavailable` or :class:`KeyNotFound` (a later try may succeed),
        :class:`Corrupt` (the blobs are damaged), :class:`InvalidTopology` (the archive breaks a
        rule) and ``OSError`` (this disk).
        """
        path = self.path_of(code_dir)
        with self._moving:
            code = self.local(code_dir)
        if code is not None:
            return code
        incomplete = self._tmp / uuid.uuid4().hex
        # Before the folder exists, which remove_unused would remove.
        self._under_way.add(incomplete.name)
        incomplete.mkdir(parents=True)
        try:
            blobs = {
                part: self._fetch_part(key_of(code_dir), incomplete / part)
                for part, key_of in _PARTS.items()
            }
            _check_conf(incomplete / "stormconf.ser", code_dir)
            unpack_archive(incomplete / "stormjar.jar", incomplete / "code", self.limits)
            (incomplete / "manifest.json").write_text(
                json.dumps({"v": 1, "blobs": blobs}), encoding="utf-8"
            )
            with self._moving:
                if path.exists():
                    # It is incomplete, by ``local``.
                    os.rename(path, self._tmp / uuid.uuid4().hex)
                os.rename(incomplete, path)
        finally:
            shutil.rmtree(incomplete, ignore_errors=True)
            self._under_way.discard(incomplete.name)
        _log.info("fetched code %s (archive %s)", code_dir, blobs["stormjar.jar"][:16])
        return LocalCode(path, blobs["stormjar.jar"])

    def remove_unused(
        self, used: Callable[[], Collection[str]], now_secs: float | None = None
    ) -> list[str]:
        """Remove unused code folders and archives.

        Returns the names of the folders. An archive in the cache is removed after ten minutes
        without use. ``used()`` is called while :attr:`removing` is set: a slot that wants code
        after that waits in :meth:`fetch`.
        """
        removed: list[str] = []
        with self._moving:
            self.removing = True
            try:
                keep = used()
                for path in self._dist.iterdir():
                    if path.name not in keep:
                        # One rename: the folder is complete or absent also during the removal.
                        os.rename(path, self._tmp / uuid.uuid4().hex)
                        removed.append(path.name)
            finally:
                self.removing: bool = False
        for path in self._tmp.iterdir():
            if path.name not in self._under_way:
                shutil.rmtree(path, ignore_errors=True)
        now = time.time() if now_secs is None else now_secs
        for path in self._cache.iterdir():
            status = path.stat()
            # With one link, no code folder shares it; the removal of the last one set its ctime.
            if status.st_nlink == 1 and now - status.st_ctime > _UNUSED_CACHE_SECS:
                path.unlink(missing_ok=True)
        return removed

    def _fetch_part(self, key: str, target: Path) -> str:
        """Fetch and verify a blob into ``target``, and return its SHA-256.

        Tries each nimbus in each round, with a growing pause between the rounds. Raises the error
        of the last attempt.
        """
        archive = target.name == "stormjar.jar"
        failure: StormDagsterError = Unavailable(
            f"code {key!r} cannot be fetched: no nimbus is known; start one, or wait for a leader"
        )
        for round_ in range(max(1, self.conf["supervisor.blobstore.download.max_retries"])):
            if round_ and self.stop.wait(0.1 * 2**round_):
                break
            for base in self.sources():
                url = f"{base.rstrip('/')}/v1/blobs/{quote(key, safe='')}"
                try:
                    if archive:
                        return self._fetch_archive(url, key, target)
                    return self._download(url, key, target, _MAX_RECORD_BYTES)
                except StormDagsterError as error:
                    failure = error
                except httpx.HTTPError as error:
                    failure = Unavailable(
                        f"code {key!r} cannot be fetched from {url}: {error_text(error)}"
                    )
                _log.warning("%s", failure.message)
        raise failure

    def _fetch_archive(self, url: str, key: str, target: Path) -> str:
        """Take the archive from the cache, or download it into ``target`` and the cache."""
        sha256 = self._from_cache(url, key, target)
        if sha256 is None:
            sha256 = self._download(url, key, target, self._max_bytes)
            # Another fetch may have stored the same content.
            with suppress(FileExistsError):
                os.link(target, self._cache / sha256)
        return sha256

    def _from_cache(self, url: str, key: str, target: Path) -> str | None:
        """Link the archive from the cache to ``target``, and return its SHA-256.

        The hash is asked of the nimbus at ``url``. ``None``, without ``target``, if it names none
        or another one than the leader recorded, or if the cache lacks the archive or has it
        damaged.
        """
        if not any(self._cache.iterdir()):
            return None  # Without a request.
        response = self._http.head(url)
        sha256 = response.headers.get("X-Content-SHA256", "")
        if response.status_code != 200 or len(sha256) != 64 or not sha256.isalnum():
            return None
        if self.expected(key) not in (None, sha256):
            return None
        cached = self._cache / sha256
        try:
            os.link(cached, target)
        except FileNotFoundError:
            return None
        if hash_file(target) != sha256:
            target.unlink()
            cached.unlink(missing_ok=True)
            return None
        return sha256

    def _download(self, url: str, key: str, target: Path, max_bytes: int) -> str:
        """Download and verify a blob, and return its SHA-256.

        After an error, ``target`` may hold a part.
        """
        digest = hashlib.sha256()
        size = 0
        buffer_bytes = self.conf["storm.blobstore.inputstream.buffer.size.bytes"]
        with self._http.stream("GET", url) as response:
            if response.status_code == 404:
                raise KeyNotFound(f"{url} does not exist there: has the topology been killed?")
            if response.status_code != 200:
                raise Unavailable(f"{url} returned {response.status_code}: see that nimbus's log")
            announced = response.headers.get("X-Content-SHA256")
            if not announced:
                raise Corrupt(f"{url} came without X-Content-SHA256: is a nimbus listening there?")
            with target.open("wb") as sink:
                for chunk in response.iter_raw(buffer_bytes):
                    size += len(chunk)
                    if size > max_bytes:
                        raise InvalidTopology(
                            f"{url} is larger than {max_bytes} bytes: raise nimbus.upload.max.bytes"
                        )
                    digest.update(chunk)
                    sink.write(chunk)
                    if self.stop.is_set():
                        raise Unavailable(f"{url}: the supervisor stops")
        sha256 = digest.hexdigest()
        if sha256 != announced:
            raise Corrupt(
                f"{url} has SHA-256 {sha256}, {announced} was announced: the stored blob is damaged"
            )
        expected = self.expected(key)
        if expected not in (None, sha256):
            raise Corrupt(
                f"{url} has SHA-256 {sha256}, the assignment of the leader says {expected}: that "
                "nimbus serves other code and none of it is run; look at its blobs, or submit the "
                "topology again"
            )
        return sha256


def _check_conf(path: Path, code_dir: str) -> None:
    """Raise :class:`Corrupt` for a topology conf that is not a JSON object."""
    try:
        read_json_object(path, "")
    except (Corrupt, RecursionError):
        raise Corrupt(
            f"conf of code {code_dir!r} is not a JSON object: submit the topology again"
        ) from None
