"""The archive is deterministic, holds what the program needs, and nothing that it must not."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.packaging.archive import (
    IgnoreRules,
    build_archive,
    bundle_target,
    collect_files,
    vendor_requirements,
)

TOPOLOGY = """
from storm_dagster.api import Spout, Topology

class Words(Spout):
    outputs = ["word"]

class Flow(Topology):
    words = Words.spec()
"""


def tree(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n", encoding="utf-8")


def test_code_travels_and_what_is_hidden_ignored_or_built_stays(tmp_path: Path) -> None:
    tree(
        tmp_path,
        "flow.py",
        "lib/code.py",
        "lib/__pycache__/code.cpython-311.pyc",
        "resources/split.sh",
        ".env",
        ".hidden/x.py",
        ".venv/lib/y.py",
        "env/pyvenv.cfg",
        "env/lib/z.py",
        "home/cluster.json",
        "home/blobs/big",
        "data/keep.csv",
        "data/drop.csv",
        "build/out.txt",
        "deep/build/out.txt",
        "notes.log",
    )
    (tmp_path / ".gitignore").write_text(
        "/build/\n*.log\ndata/*\n!data/keep.csv\n", encoding="utf-8"
    )
    (tmp_path / "lib" / ".gitignore").write_text("secret.py\n", encoding="utf-8")
    tree(tmp_path, "lib/secret.py", "secret.py")
    found = collect_files(tmp_path, leave_out=[tmp_path / "home"])
    assert sorted(found) == [
        "data/keep.csv",
        "deep/build/out.txt",
        "flow.py",
        "lib/code.py",
        "resources/split.sh",
        "secret.py",
    ]


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    tree(tmp_path / "a", "flow.py", "run.sh")
    (tmp_path / "a" / "run.sh").chmod(0o755)
    first = build_archive(tmp_path / "1.zip", collect_files(tmp_path / "a"))
    os.utime(tmp_path / "a" / "flow.py", (1, 1))
    second = build_archive(
        tmp_path / "2.zip", dict(reversed(collect_files(tmp_path / "a").items()))
    )
    assert first.sha256 == second.sha256 and first.files == 2
    with zipfile.ZipFile(tmp_path / "1.zip") as bundle:
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in bundle.infolist()}
    assert modes == {"flow.py": 0o644, "run.sh": 0o755}
    (tmp_path / "a" / "flow.py").write_text("changed", encoding="utf-8")
    assert build_archive(tmp_path / "3.zip", collect_files(tmp_path / "a")).sha256 != first.sha256


def test_too_much_is_refused_naming_the_largest(tmp_path: Path) -> None:
    tree(tmp_path, "flow.py")
    for name, size in (("huge.bin", 60), ("large.bin", 10), ("small.bin", 1)):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(size * 2**20)
    with pytest.raises(InvalidTopology) as caught:
        collect_files(tmp_path)
    message = caught.value.message
    assert "64 MiB" in message and message.index("huge.bin (60.0 MiB)") < message.index(
        "large.bin (10.0 MiB)"
    )
    (tmp_path / ".gitignore").write_text("huge.bin\n", encoding="utf-8")
    assert "huge.bin" not in collect_files(tmp_path)


def test_nothing_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(InvalidTopology, match="empty"):
        build_archive(tmp_path / "x.zip", {})


def test_links_are_followed_once(tmp_path: Path) -> None:
    tree(tmp_path / "src", "flow.py", "lib/a.py")
    tree(tmp_path / "other", "b.py")
    (tmp_path / "src" / "lib" / "loop").symlink_to(tmp_path / "src")
    (tmp_path / "src" / "more").symlink_to(tmp_path / "other")
    (tmp_path / "src" / "gone").symlink_to(tmp_path / "nowhere")
    assert sorted(collect_files(tmp_path / "src")) == ["flow.py", "lib/a.py", "more/b.py"]


@pytest.mark.parametrize(
    ("line", "path", "folder", "named"),
    [
        ("*.pyc", "a/b.pyc", False, True),
        ("/a.txt", "a.txt", False, True),
        ("/a.txt", "x/a.txt", False, False),
        ("doc/*.txt", "doc/a.txt", False, True),
        ("doc/*.txt", "doc/x/a.txt", False, False),
        ("doc/**/a.txt", "doc/x/y/a.txt", False, True),
        ("doc/**/a.txt", "doc/a.txt", False, True),
        ("**/logs", "x/logs", True, True),
        ("logs/", "logs", False, False),
        ("logs/", "x/logs", True, True),
        ("abc/**", "abc/x/y", False, True),
        ("[ab].txt", "b.txt", False, True),
        ("[!ab].txt", "b.txt", False, False),
        ("\\#x", "#x", False, True),
        ("# comment", "# comment", False, False),
        ("trailing   ", "trailing", False, True),
        ("a?c", "abc", False, True),
        ("a?c", "a/c", False, False),
        ("[", "[", False, False),
    ],
)
def test_ignore_patterns_mean_what_they_mean_to_git(
    tmp_path: Path, line: str, path: str, folder: bool, named: bool
) -> None:
    (tmp_path / ".gitignore").write_text(line + "\n", encoding="utf-8")
    assert IgnoreRules(tmp_path).is_ignored(tmp_path / path, folder) is named


def test_the_innermost_rule_wins_and_a_broken_line_is_skipped(tmp_path: Path) -> None:
    tree(tmp_path, "sub/keep.bin", "sub/drop.bin", "top.bin", "sub/a.py")
    (tmp_path / ".gitignore").write_text("*.bin\n!\n", encoding="utf-8")
    (tmp_path / "sub" / ".gitignore").write_text("!keep.bin\n", encoding="utf-8")
    assert sorted(collect_files(tmp_path)) == ["sub/a.py", "sub/keep.bin"]


def test_rules_of_outer_folders_count_up_to_the_repository(tmp_path: Path) -> None:
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("*.py\n", encoding="utf-8")
    (tmp_path / "repo" / ".gitignore").write_text("*.bin\n", encoding="utf-8")
    tree(tmp_path / "repo" / "src", "a.py", "a.bin")
    rules = IgnoreRules(tmp_path / "repo" / "src")
    assert rules.is_ignored(tmp_path / "repo" / "src" / "a.bin", False)
    assert not rules.is_ignored(tmp_path / "repo" / "src" / "a.py", False)


def test_an_archive_travels_byte_for_byte(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as bundle:
        bundle.writestr("flow.py", TOPOLOGY)
    before = (tmp_path / "own.zip").read_bytes()
    (tmp_path / "work").mkdir()
    made = bundle_target(f"{tmp_path / 'own.zip'}::flow", folder=tmp_path / "work")
    assert made.archive.path.read_bytes() == before and made.name == "flow"


def test_requirements_are_vendored(tmp_path: Path) -> None:
    tree(tmp_path, "lib_src/tiny_lib/__init__.py")
    (tmp_path / "lib_src" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny-lib"\nversion = "1.0"\n',
        encoding="utf-8",
    )
    # A build back end of its own, so that pip needs no network.
    (tmp_path / "lib_src" / "backend.py").write_text(
        "import zipfile\n"
        "def build_wheel(folder, config_settings=None, metadata_directory=None):\n"
        "    name = 'tiny_lib-1.0-py3-none-any.whl'\n"
        "    with zipfile.ZipFile(folder + '/' + name, 'w') as out:\n"
        "        out.writestr('tiny_lib/__init__.py', 'VALUE = 7\\n')\n"
        "        out.writestr('tiny_lib-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: tiny-lib\\nVersion: 1.0\\n')\n"
        "        out.writestr('tiny_lib-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "        out.writestr('tiny_lib-1.0.dist-info/RECORD', '')\n"
        "    return name\n",
        encoding="utf-8",
    )
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("./lib_src\n", encoding="utf-8")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "flow.py").write_text(TOPOLOGY, encoding="utf-8")
    (tmp_path / "work").mkdir()
    made = bundle_target(
        str(tmp_path / "app" / "flow.py"), folder=tmp_path / "work", requirements=requirements
    )
    with zipfile.ZipFile(made.archive.path) as bundle:
        names = bundle.namelist()
    assert "flow.py" in names and "tiny_lib/__init__.py" in names


def test_requirements_that_cannot_be_installed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the file does not exist"):
        vendor_requirements(tmp_path / "none.txt", tmp_path / "out")
    (tmp_path / "bad.txt").write_text("./nowhere\n", encoding="utf-8")
    with pytest.raises(InvalidTopology, match="pip cannot install"):
        vendor_requirements(tmp_path / "bad.txt", tmp_path / "out")
