"""Unpacking of untrusted archives: zip, jar, whl and tar.gz.

No part of an archive is trusted: names are checked against one grammar, only plain files and
folders are accepted, and the unpacked bytes are counted, not those that headers state. An archive
that breaks a rule is refused completely with :class:`InvalidTopology`, which names the entry, and
leaves no files.
"""

import gzip
import hashlib
import os
import re
import shutil
import stat
import struct
import tarfile
import unicodedata
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from storm_dagster.model.errors import InvalidTopology, error_text
from storm_dagster.model.names import INVISIBLE

_CHUNK = 256 * 1024
"""Bytes that are unpacked between two checks of the size."""
_INVISIBLE = re.compile(f"[{INVISIBLE}]")
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
"""Type in a Unix mode -> its name in an error; all others are devices."""
_HEADER_BYTES = 1024**2
"""Maximum size of a tar's headers before one entry."""


@dataclass(frozen=True)
class UnpackLimits:
    """Limits of one archive."""

    entries: int = 100_000
    """Maximum number of files and folders."""
    total_bytes: int = 4 * 1024**3
    """Maximum size of all unpacked files together."""
    ratio: int = 200
    """Maximum number of unpacked bytes for one byte of the archive."""
    ratio_from_bytes: int = 32 * 1024**2
    """Unpacked bytes from which the ratio counts (short text compresses far better)."""
    path_bytes: int = 1024
    """Maximum length of an entry's path in UTF-8 bytes."""

    def too_many(self, archive: str) -> InvalidTopology:
        """The error for an archive with more entries."""
        return InvalidTopology(
            f"archive {archive} has more than {self.entries} entries: leave out unneeded files"
        )


@dataclass(frozen=True)
class _Entry:
    """One plain file or folder; ``stream`` is ``None`` for a folder."""

    name: str
    executable: bool
    stream: IO[bytes] | None


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def archive_kind(path: Path) -> Literal["zip", "tar.gz"]:
    """The kind of the file, by its content: jar and whl are zips.

    :class:`InvalidTopology` for another file.
    """
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic in (b"PK\x03\x04", b"PK\x05\x06") or (magic and zipfile.is_zipfile(path)):
        return "zip"
    if magic[:2] == b"\x1f\x8b":
        return "tar.gz"
    raise InvalidTopology(
        f"archive {path.name} is neither zip (zip, jar, whl) nor tar.gz: pack it as one of those"
    )


def unpack_archive(path: Path, target: Path, limits: UnpackLimits | None = None) -> None:
    """Unpack into ``target``, which must not exist.

    The folder appears complete or not at all. Raises :class:`InvalidTopology` for an archive that
    breaks a rule, and ``OSError`` if it cannot be written. In both cases the folder beside
    ``target``, to which the files are written first, is removed.
    """
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unpacking")
    scratch.mkdir(parents=True)
    try:
        _walk(path, limits or UnpackLimits(), scratch)
        os.rename(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


@dataclass
class _Names:
    """Check of names; no two entries may have the same path on any file system."""

    archive: str
    """Name of the archive, for errors."""
    limits: UnpackLimits
    files: dict[str, str] = field(default_factory=dict)
    """Folded path of a file -> its name in the archive."""
    folders: dict[str, str] = field(default_factory=dict)
    """Folded path of a folder, also of one that a path only implies -> its path."""

    def refuse(self, name: str, problem: str) -> InvalidTopology:
        """The error for an entry with this problem."""
        return InvalidTopology(
            f"archive {self.archive}: entry {name!r:.200} {problem}: pack it again without"
        )

    def take(self, name: str, *, folder: bool) -> tuple[str, ...]:
        """The parts of the entry's path, checked; empty for the root folder.

        Raises :class:`InvalidTopology` for a name that breaks a rule, that another entry has, or
        that is one too many.
        """
        if not name or any(ord(character) < 32 or ord(character) == 127 for character in name):
            raise self.refuse(name, "has an empty name or control characters in it")
        if _INVISIBLE.search(name):
            raise self.refuse(
                name, "has characters in its name that are not seen or turn it around"
            )
        if "\\" in name:
            raise self.refuse(name, "has a backslash in its name")
        try:
            encoded = name.encode()
        except UnicodeEncodeError:
            raise self.refuse(name, "has a name that is not UTF-8") from None
        if len(encoded) > self.limits.path_bytes:
            raise self.refuse(name, f"has a name of more than {self.limits.path_bytes} bytes")
        if name.startswith("/") or (len(name) > 1 and name[1] == ":" and name[0].isalpha()):
            raise self.refuse(name, "has an absolute path")
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if ".." in parts:
            raise self.refuse(name, "points outside with '..'")
        if any(len(part.encode()) > 255 for part in parts):
            raise self.refuse(name, "has a part of more than 255 bytes in its name")
        if not parts and not folder:
            raise self.refuse(name, "has no name")
        self._claim(name, parts, folder)
        return parts

    def _claim(self, name: str, parts: tuple[str, ...], folder: bool) -> None:
        """Add the entry and the folders around it; refuse it if another one has its path."""
        # Case and Unicode forms: names that differ on one file system are equal on another.
        folded = [unicodedata.normalize("NFC", part).casefold() for part in parts]
        folder_depth = len(parts) if folder else len(parts) - 1
        for depth in range(1, folder_depth + 1):
            key = "/".join(folded[:depth])
            real = "/".join(parts[:depth])
            if key in self.files:
                raise self.refuse(name, f"lies below {self.files[key]!r:.80}, which is a file")
            if self.folders.setdefault(key, real) != real:
                raise self.refuse(
                    name, f"differs from {self.folders[key]!r:.80} only in case or form"
                )
        if not folder:
            key = "/".join(folded)
            namesake = self.files.get(key) or self.folders.get(key)
            if namesake is not None:
                raise self.refuse(name, f"collides with {namesake!r:.80}")
            self.files[key] = name
        # A path may imply hundreds of folders that are not entries.
        if len(self.files) + len(self.folders) > self.limits.entries:
            raise self.limits.too_many(self.archive)


def _walk(path: Path, limits: UnpackLimits, target: Path) -> None:
    """Unpack the entries into the existing folder ``target``, one by one.

    Raises :class:`InvalidTopology` at the first that breaks a rule; the former ones stay.
    """
    names = _Names(path.name, limits)
    packed = path.stat().st_size
    # Unpacked bytes so far.
    total = 0
    entries_of = _zip_entries if archive_kind(path) == "zip" else _tar_entries
    try:
        for number, entry in enumerate(entries_of(path, limits, names)):
            if number >= limits.entries:
                raise limits.too_many(path.name)
            parts = names.take(entry.name, folder=entry.stream is None)
            if entry.stream is None:
                target.joinpath(*parts).mkdir(parents=True, exist_ok=True)
                continue
            with entry.stream, _create(target.joinpath(*parts), entry.executable) as sink:
                while chunk := entry.stream.read(_CHUNK):
                    total += len(chunk)
                    _check_size(path.name, entry.name, total, packed, limits)
                    sink.write(chunk)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise InvalidTopology(
            f"archive {path.name} is damaged ({error_text(error)}): pack and upload it again"
        ) from None
    except (NotImplementedError, RuntimeError, struct.error, ValueError) as error:
        # zipfile: an unknown compression or an encrypted entry; tarfile: impossible numbers.
        raise InvalidTopology(
            f"archive {path.name} cannot be read ({error_text(error)}): pack it again"
        ) from None


def _create(path: Path, executable: bool) -> IO[bytes]:
    """Create a file and the folders around it, and open it for writing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_EXCL and O_NOFOLLOW: a file is only created; an existing file or link is never written.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o755 if executable else 0o644), "wb")


def _check_size(archive: str, name: str, total: int, packed: int, limits: UnpackLimits) -> None:
    """Refuse an archive of ``packed`` bytes of which ``total`` bytes are too much."""
    if total > limits.total_bytes:
        raise InvalidTopology(
            f"archive {archive}: with entry {name!r:.200} it unpacks to more than "
            f"{limits.total_bytes} bytes: leave out unneeded files"
        )
    if total > limits.ratio_from_bytes and total > limits.ratio * max(packed, 1):
        raise InvalidTopology(
            f"archive {archive}: entry {name!r:.200} unpacks to more than {limits.ratio} times "
            "the archive's size: it looks like a decompression bomb, leave it out"
        )


class _Directory:
    """A zip's file while its directory is read.

    zipfile reads the directory in one piece, wherever it finds it. Here a read is limited, and an
    archive with too many entries is refused before objects are made of them.
    """

    def __init__(self, stream: IO[bytes], archive: str, limits: UnpackLimits) -> None:
        self._stream = stream
        self._archive = archive
        self._limits = limits
        self.seek = stream.seek
        self.tell = stream.tell
        self.seekable = stream.seekable

    def read(self, size: int = -1) -> bytes:
        # The longest directory: each entry with a name of the longest path.
        max_size = self._limits.entries * 2048 + 1024**2
        data = self._stream.read(max_size if size < 0 else min(size, max_size))
        if data.count(b"PK\x01\x02") > self._limits.entries:
            raise self._limits.too_many(self._archive)
        return data


def _zip_entries(path: Path, limits: UnpackLimits, names: _Names) -> Iterator[_Entry]:
    """Yield the entries of a zip, in the order of its directory, with their content unread."""
    with (
        path.open("rb") as stream,
        zipfile.ZipFile(_Directory(stream, path.name, limits)) as archive,
    ):
        # The directory is read: contents come from the file itself, without the limit.
        archive.fp = stream
        for info in archive.infolist():
            # Unix mode; 0 where another system packed it.
            mode = info.external_attr >> 16
            folder = info.filename.endswith("/")
            if info.flag_bits & 0x1:
                raise names.refuse(info.filename, "is encrypted")
            kind = stat.S_IFMT(mode)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise names.refuse(
                    info.filename,
                    f"is {_KINDS.get(kind, 'a device')}, only files and folders may be packed",
                )
            if kind == stat.S_IFDIR and not folder:
                raise names.refuse(info.filename, "is a folder by its mode and a file by its name")
            yield _Entry(info.filename, bool(mode & 0o111), None if folder else archive.open(info))


class _Bounded:
    """A decompressed stream with limits of its total size and of each header.

    tarfile reads extended headers in one piece of any size that they state, before it returns a
    member. Raises :class:`InvalidTopology` beyond a limit.
    """

    def __init__(
        self, stream: gzip.GzipFile, archive: str, packed: int, limits: UnpackLimits
    ) -> None:
        self._stream = stream
        self._archive = archive
        content_bytes = max(limits.ratio * packed, limits.ratio_from_bytes)
        # Headers and padding are not part of the content.
        overhead_bytes = 2048 * limits.entries + 1024**2
        self._max_position = min(limits.total_bytes, content_bytes) + overhead_bytes
        """Unpacked bytes that may be read or skipped."""
        self.header_bytes: int | None = 0
        """Bytes read for the next member's headers; ``None`` while contents are read."""

    def read(self, size: int = -1) -> bytes:
        if self.header_bytes is not None:
            # A read without a size would be of any size: it is beyond the limit.
            self.header_bytes += size if size >= 0 else _HEADER_BYTES + 1
            if self.header_bytes > _HEADER_BYTES:
                raise InvalidTopology(
                    f"archive {self._archive} has more than {_HEADER_BYTES} bytes of headers "
                    "before an entry: it is damaged or forged, pack it again"
                )
        data = self._stream.read(size)
        self._check(self._stream.tell())
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        if whence == 0:
            self._check(position)
        return self._stream.seek(position, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def _check(self, position: int) -> None:
        if position > self._max_position:
            raise InvalidTopology(
                f"archive {self._archive} unpacks to more than {self._max_position} bytes: "
                "it looks like a decompression bomb, leave out unneeded files"
            )


def _tar_entries(path: Path, limits: UnpackLimits, names: _Names) -> Iterator[_Entry]:
    """Yield the entries of a tar.gz, in its order, with their content unread."""
    with gzip.open(path, "rb") as stream:
        assert isinstance(stream, gzip.GzipFile)
        bounded = _Bounded(stream, path.name, path.stat().st_size, limits)
        with tarfile.open(fileobj=bounded, mode="r:") as archive:  # type: ignore[arg-type]
            while (member := archive.next()) is not None:
                bounded.header_bytes = None
                # tarfile remembers every member, and the content of global headers.
                archive.members.clear()  # type: ignore[attr-defined]
                archive.pax_headers.clear()
                yield _tar_entry(archive, member, names)
                bounded.header_bytes = 0


def _tar_entry(archive: tarfile.TarFile, member: tarfile.TarInfo, names: _Names) -> _Entry:
    """The entry of a plain file or folder; :class:`InvalidTopology` for any other member."""
    if member.isdir():
        return _Entry(member.name, False, None)
    if not member.isreg():
        kind = "a link" if member.issym() or member.islnk() else "a device, pipe or unknown kind"
        raise names.refuse(member.name, f"is {kind}, only files and folders may be packed")
    if member.issparse():
        raise names.refuse(member.name, "is a sparse file")
    content = archive.extractfile(member)
    assert content is not None
    return _Entry(member.name, bool(member.mode & 0o111), content)
