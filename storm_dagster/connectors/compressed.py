"""Decompression of files with several members, in which a cut or damaged file is an error.

The readers of the standard library and of fsspec end in silence at damaged bytes after a member of
bzip2 and xz, in a cut file of Zstandard, and after the first of several files in a zip archive. An
empty file has no members, and is not an error.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

from storm_dagster.model.errors import error_text

_CHUNK_BYTES = 1 << 16


class DamagedArchive(ValueError):
    """Compressed file that is cut, or whose bytes are damaged."""


class _Gzip:
    """Decompressor of one member of gzip, with the interface of ``bz2.BZ2Decompressor``."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def needs_input(self) -> bool:
        return not self._inflate.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)


class _Zstandard:
    """Decompressor of one frame of Zstandard, with the interface of ``bz2.BZ2Decompressor``."""

    def __init__(self) -> None:
        import zstandard

        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._frame.decompress(data)


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip,
    "bz2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "lzma": lzma.LZMADecompressor,
    "zstd": _Zstandard,
}
"""Compression -> decompressor of one member of a file."""


class _MemberReader(io.RawIOBase):
    """All members of a compressed file, one after the other, as one stream of bytes."""

    def __init__(self, file: Any, make_decompressor: Callable[[], Any], kind: str) -> None:
        self._file = file
        self._make_decompressor = make_decompressor
        self._kind = kind
        self._decompressor = make_decompressor()
        self._input = b""
        """Compressed bytes that were read, and not passed to the decompressor."""
        self._output = memoryview(b"")
        """Decompressed bytes that were not returned."""
        self._has_begun = False
        """True if the decompressor has got bytes of its member."""
        self._members = 0
        """Number of members that were read to their end."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._output:
            self._output = memoryview(self._read_some(len(buffer)))
        data = self._output[: len(buffer)]
        # A frame of Zstandard may return more than was asked for.
        self._output = self._output[len(data) :]
        buffer[: len(data)] = data
        return len(data)

    def _read_some(self, max_bytes: int) -> bytes:
        """The next bytes, about ``max_bytes``; none at the end of the last member."""
        while True:
            if not self._input and self._decompressor.needs_input:
                self._input = self._file.read(_CHUNK_BYTES)
                if not self._input:
                    self._check_end()
                    return b""
            if not self._has_begun and self._members:
                # Tapes and block devices fill the last block with zeros.
                self._input = self._input.lstrip(b"\0")
                if not self._input:
                    continue
            data = self._decompress(max_bytes)
            if data:
                return data

    def _decompress(self, max_bytes: int) -> bytes:
        self._has_begun = True
        compressed = self._input
        self._input = b""
        try:
            data = self._decompressor.decompress(compressed, max_bytes)
        except Exception as error:
            raise DamagedArchive(
                f"its {self._kind} data are damaged after {self._members} whole members "
                f"({error_text(error)})"
            ) from None
        if self._decompressor.eof:
            self._input = self._decompressor.unused_data
            self._decompressor = self._make_decompressor()
            self._has_begun = False
            self._members += 1
        return data

    def _check_end(self) -> None:
        if self._has_begun:
            raise DamagedArchive(f"its {self._kind} data are cut: the end of a member is missing")


def open_decompressed(file: Any, compression: str | None) -> Any:
    """A readable file of the decompressed bytes of a file.

    ``compression`` is a name of fsspec, ``None`` for bytes as they are. Raises
    :class:`DamagedArchive`, here or while it is read, if bytes are damaged or missing.
    """
    if compression is None:
        return file
    make_decompressor = _DECOMPRESSORS.get(compression)
    if make_decompressor is not None:
        return io.BufferedReader(_MemberReader(file, make_decompressor, compression), _CHUNK_BYTES)
    if compression == "zip":
        return _only_member_of_zip(file)
    from fsspec.compression import compr

    codecs: Any = compr
    return codecs[compression](file, mode="rb")


def _only_member_of_zip(file: Any) -> Any:
    import zipfile

    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise DamagedArchive(f"its zip data are damaged or cut ({error})") from None
    names = [entry.filename for entry in archive.filelist if not entry.is_dir()]
    if len(names) != 1:
        raise DamagedArchive(
            f"its zip archive has {len(names)} files, and only one can be read: unpack it"
        )
    return archive.open(names[0])
