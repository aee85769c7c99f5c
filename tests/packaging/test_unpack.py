"""Archives that are not trusted: nothing gets outside, nothing is half there."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.model.errors import InvalidTopology
from storm_dagster.packaging.unpack import UnpackLimits, archive_kind, unpack_archive

SMALL = UnpackLimits(entries=50, total_bytes=1_000_000, ratio=20, ratio_from_bytes=100_000)


def zip_of(path: Path, entries: dict[str, bytes], modes: dict[str, int] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            info = zipfile.ZipInfo("x")
            info.filename = name
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (modes or {}).get(name, 0o644) << 16
            archive.writestr(info, content)
    return path


def tar_of(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def refused(path: Path, tmp_path: Path, match: str, limits: UnpackLimits = SMALL) -> None:
    """It is refused with these words, and nothing of it stays."""
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(InvalidTopology, match=match):
        unpack_archive(path, tmp_path / "out", limits)
    assert sorted(os.listdir(tmp_path)) == before


def test_folders_that_paths_imply_count(tmp_path: Path) -> None:
    entries = {f"{number}/" + "a/" * 20 + "f": b"" for number in range(5)}
    refused(zip_of(tmp_path / "a.zip", entries), tmp_path, "more than 50 entries")


def test_zip_and_tar_give_the_same_tree(tmp_path: Path) -> None:
    files = {"wc.py": b"x = 1\n", "pkg/__init__.py": b"", "resources/split.sh": b"#!/bin/sh\n"}
    zipped = zip_of(tmp_path / "a.jar", files, {"resources/split.sh": 0o755 | stat.S_IFREG})
    tarred = tar_of(
        tmp_path / "a.tar.gz",
        [
            (member(name, mode=0o4755 if name.endswith(".sh") else 0o644), content)
            for name, content in files.items()
        ],
    )
    for archive in (zipped, tarred):
        target = tmp_path / f"out-{archive.name}"
        unpack_archive(archive, target, SMALL)
        assert {
            str(path.relative_to(target)): path.read_bytes()
            for path in target.rglob("*")
            if path.is_file()
        } == files
        assert (target / "resources/split.sh").stat().st_mode & 0o7777 == 0o755
        assert (target / "wc.py").stat().st_mode & 0o7777 == 0o644


def test_folders_of_their_own_and_empty_archives(tmp_path: Path) -> None:
    unpack_archive(
        zip_of(tmp_path / "d.zip", {"a/": b"", "a/b/": b"", "./": b""}), tmp_path / "d", SMALL
    )
    assert (tmp_path / "d/a/b").is_dir()
    unpack_archive(zip_of(tmp_path / "e.zip", {}), tmp_path / "e", SMALL)
    assert list((tmp_path / "e").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("../x", r"'\.\./x' points outside"),
        ("a/../../x", "points outside"),
        ("/etc/passwd", "absolute"),
        ("C:/x", "absolute"),
        ("a\\..\\b", "backslash"),
        ("a\nb", "control"),
        ("a\u202egpj.py", "not seen or turn"),
        ("a\u200b.py", "not seen or turn"),
        ("x" * 256, "more than 255 bytes"),
        ("a/" * 600 + "x", "more than 1024 bytes"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, name: str, match: str) -> None:
    refused(zip_of(tmp_path / "a.zip", {"good.py": b"1", name: b"evil"}), tmp_path, match)
    tarred = tar_of(tmp_path / "a.tar.gz", [(member("good.py"), b"1"), (member(name), b"evil")])
    refused(tarred, tmp_path, match)
    assert not (tmp_path.parent / "x").exists()


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        ("a.py", "A.py", "collides"),
        ("stra\u00dfe", "STRASSE", "collides"),
        ("caf\u00e9", "cafe\u0301", "collides"),
        ("a", "a", "collides"),
        ("a", "a/b", "is a file"),
        ("a/b", "a", "collides"),
        ("Dir/x", "dir/y", "only in case"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_collisions_are_refused(tmp_path: Path, first: str, second: str, match: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(first, b"1")
        archive.writestr(second, b"2")
    refused(tmp_path / "a.zip", tmp_path, match)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (tarfile.SYMTYPE, "a link"),
        (tarfile.LNKTYPE, "a link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a device, pipe"),
    ],
)
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes, match: str) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    tarred = tar_of(
        tmp_path / "a.tar.gz",
        [(member("esc", kind, str(outside)), b""), (member("esc/planted"), b"evil")],
    )
    refused(tarred, tmp_path, match)
    assert list(outside.iterdir()) == []


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    archive = zip_of(tmp_path / "a.zip", {"esc": b"/etc"}, {"esc": stat.S_IFLNK | 0o777})
    refused(archive, tmp_path, "is a link")


def test_too_many_entries_are_refused(tmp_path: Path) -> None:
    names = {f"f{i}": b"" for i in range(51)}
    refused(zip_of(tmp_path / "a.zip", names), tmp_path, "more than 50 entries")
    refused(
        tar_of(tmp_path / "a.tar.gz", [(member(n), b"") for n in names]),
        tmp_path,
        "more than 50 entries",
    )


def test_bombs_are_refused_by_ratio_and_by_size(tmp_path: Path) -> None:
    big = {"ok.py": b"1", "zeros": bytes(900_000)}
    refused(zip_of(tmp_path / "a.zip", big), tmp_path, "'zeros' unpacks to more than 20 times")
    refused(
        tar_of(tmp_path / "a.tar.gz", [(member(n), c) for n, c in big.items()]),
        tmp_path,
        "20 times",
    )
    random = os.urandom(600_000)
    refused(
        zip_of(tmp_path / "b.zip", {"a": random, "b": random}),
        tmp_path,
        "'b' it unpacks to more than 1000000",
    )


def test_a_zip_that_lies_about_its_sizes(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", {"zeros": bytes(500_000)})
    raw = path.read_bytes().replace((500_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    path.write_bytes(raw)
    with pytest.raises(InvalidTopology):
        unpack_archive(path, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


def test_a_tar_header_of_a_gigabyte_is_not_read_into_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 2**30
    with gzip.open(tmp_path / "a.tar.gz", "wb") as stream:
        stream.write(info.tobuf(tarfile.USTAR_FORMAT))
        stream.write(bytes(4096))
    refused(tmp_path / "a.tar.gz", tmp_path, "damaged or forged")


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"PK\x03\x04garbage", b"\x1f\x8bgarbage", b"\x80\x04N."]
)
def test_garbage_is_refused_and_the_file_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    refused(tmp_path / "a.zip", tmp_path, "a.zip")


def test_truncated_archives_leave_nothing(tmp_path: Path) -> None:
    whole = zip_of(tmp_path / "w.zip", {"a": os.urandom(5000)}).read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "cut.zip", tmp_path, "damaged")
    tarred = tar_of(tmp_path / "w.tar.gz", [(member("a"), os.urandom(50_000))]).read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(tarred[: len(tarred) // 2])
    refused(tmp_path / "cut.tar.gz", tmp_path, "damaged")


def test_encrypted_entries_are_refused(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", {"secret": b"x"})
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(bytes(raw))
    refused(path, tmp_path, "'secret' is encrypted")


def test_an_existing_target_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(OSError):
        unpack_archive(zip_of(tmp_path / "a.zip", {"a": b"1"}), tmp_path / "out", SMALL)
    assert os.listdir(tmp_path / "out") == ["mine"]
    assert archive_kind(tmp_path / "a.zip") == "zip"


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.sampled_from(["a", "A", "..", ".", "", "b", "~", "con", "\u00e9"]),
                min_size=1,
                max_size=4,
            ),
            st.booleans(),
        ),
        max_size=6,
    )
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_whatever_the_names_nothing_gets_outside(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[list[str], bool]]
) -> None:
    base = tmp_path_factory.mktemp("names")
    with zipfile.ZipFile(base / "a.zip", "w") as archive:
        for parts, folder in entries:
            info = zipfile.ZipInfo("x")
            info.filename = "/".join(parts) + ("/" if folder else "")
            archive.writestr(info, b"" if info.filename.endswith("/") else b"content")
    (base / "box").mkdir()
    try:
        unpack_archive(base / "a.zip", base / "box" / "out", SMALL)
        left = ["out"]
    except InvalidTopology:
        left = []
    assert os.listdir(base / "box") == left
    assert sorted(os.listdir(base)) == ["a.zip", "box"]


def _zip_with_a_hidden_directory(path: Path, entries: int, how: str) -> Path:
    """A zip whose real directory a look at its last record alone does not find."""
    name = zip_of(path, {str(number): b"" for number in range(entries)})
    content = name.read_bytes()
    end = content.rfind(b"PK\x05\x06")
    directory = int.from_bytes(content[end + 16 : end + 20], "little")
    if how == "comment":
        # The longest comment: its record is where a search of one byte less does not look.
        content = content[: end + 20] + (65_535).to_bytes(2, "little") + b"c" * 65_535
    else:
        size = end - directory
        record = (
            b"PK\x06\x06"
            + (44).to_bytes(8, "little")
            + bytes(12)
            + entries.to_bytes(8, "little") * 2
        )
        record += size.to_bytes(8, "little") + directory.to_bytes(8, "little")
        small = b"PK\x06\x06" + (44).to_bytes(8, "little") + bytes(44)
        # The locator names the small one; readers take the one before it.
        locator = b"PK\x06\x07" + bytes(4) + end.to_bytes(8, "little") + (1).to_bytes(4, "little")
        tail = b"PK\x05\x06" + bytes(4) + b"\xff" * 12 + bytes(2)
        content = content[:end] + small + record + locator + tail
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("how", ["comment", "zip64"])
def test_entries_are_counted_in_the_directory_that_is_read(tmp_path: Path, how: str) -> None:
    made: list[str] = []

    class Counted(zipfile.ZipInfo):
        def __init__(self, *args: object) -> None:
            made.append("")
            super().__init__(*args)  # type: ignore[arg-type]

    path = _zip_with_a_hidden_directory(tmp_path / "a.zip", 2000, how)
    plain = zipfile.ZipInfo
    zipfile.ZipInfo = Counted  # type: ignore[misc]
    try:
        refused(path, tmp_path, "more than 50 entries|damaged")
    finally:
        zipfile.ZipInfo = plain  # type: ignore[misc]
    assert len(made) <= 50


def test_global_headers_of_a_tar_are_not_collected(tmp_path: Path) -> None:
    content = io.BytesIO()
    for number in range(200):
        value = f"k{number}=".encode() + b"v" * 60_000 + b"\n"
        length = len(value) + 6
        value = f"{length} ".encode() + value
        info = tarfile.TarInfo("headers")
        info.type, info.size = tarfile.XGLTYPE, len(value)
        content.write(info.tobuf(tarfile.USTAR_FORMAT) + value + bytes(-len(value) % 512))
        if number % 40 == 39:
            content.write(member(f"f{number}").tobuf(tarfile.USTAR_FORMAT))
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(content.getvalue() + bytes(1024)))
    refused(path, tmp_path, "bytes of headers before an entry", UnpackLimits())
