"""Targets are described by a child process, and every bad one is a typed error that says what to
do.
"""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from pathlib import Path

import psutil
import pytest

from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.packaging.target import describe_target, parse_target
from storm_dagster.testing.waiting import eventually

COMPONENTS = """
from storm_dagster.api import Bolt, Grouping, Spout, Topology, TopologyBuilder

class Words(Spout):
    outputs = ["word"]

class Count(Bolt):
    outputs = ["word", "count"]
"""
ONE = (
    COMPONENTS
    + """
class WordCount(Topology):
    words = Words.spec()
    count = Count.spec(inputs={words: Grouping.fields("word")}, par=2)
"""
)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(target: str, *args: str, timeout: float = 30.0) -> str:
    with pytest.raises(InvalidTopology) as caught:
        describe_target(target, args, timeout)
    return caught.value.message


def test_a_file_is_described_under_its_stem_and_never_imported_here(tmp_path: Path) -> None:
    found = describe_target(write(tmp_path / "my_words.py", ONE + "\nprint('noise on stdout')\n"))
    assert found.name == "my_words"
    assert list(found.topology.spouts) == ["words"]
    assert found.topology.bolts["count"].parallelism == 2
    assert found.topology.bolts["count"].object.python == "my_words:Count"
    assert found.root == tmp_path and found.include is None
    assert "my_words" not in sys.modules


def test_a_topology_among_several_is_named(tmp_path: Path) -> None:
    target = write(tmp_path / "two.py", ONE + "\nclass Other(WordCount):\n    name = 'own-name'\n")
    assert "holds 2 topologies (Other, WordCount)" in refused(target)
    assert describe_target(f"{target}:WordCount").name == "WordCount"
    assert describe_target(f"{target}:Other").name == "own-name"


def test_an_imported_topology_is_not_one_of_the_module(tmp_path: Path) -> None:
    write(tmp_path / "base.py", ONE)
    target = write(
        tmp_path / "derived.py", "from base import WordCount\nclass Mine(WordCount):\n    pass\n"
    )
    assert describe_target(target).name == "derived"


def test_a_callable_gets_the_arguments(tmp_path: Path) -> None:
    text = COMPONENTS + (
        "\ndef make(name, par='1'):\n"
        "    builder = TopologyBuilder(name)\n"
        "    builder.set_spout('words', Words, par=int(par))\n"
        "    return builder\n"
    )
    target = write(tmp_path / "made.py", text)
    found = describe_target(f"{target}:make", ["built", "3"])
    assert found.name == "built" and found.topology.spouts["words"].parallelism == 3
    assert "TypeError" in refused(f"{target}:make")
    assert "takes no arguments" in refused(f"{write(tmp_path / 'one.py', ONE)}:WordCount", "x")


@pytest.mark.parametrize(
    ("text", "name", "output"),
    [
        ("x = 1\n", None, "holds no topology"),
        (ONE, "Missing", "has no attribute 'Missing'; topologies in it: WordCount"),
        (ONE + "\nnumber = 7\n", "number", "is int, which is not a topology"),
        (ONE + "\ndef make():\n    return 7\n", "make", "returned int, which is not a topology"),
        (
            ONE + "\ndef make():\n    raise KeyError('boom')\n",
            "make",
            "make raised KeyError: 'boom'",
        ),
        ("1 / 0\n", None, "ZeroDivisionError"),
        ("def broken(:\n", None, "SyntaxError"),
        (
            "import no_such_package_at_all\n",
            None,
            "needs 'no_such_package_at_all', which is not installed",
        ),
        ("import sys\nsys.exit(3)\n", None, "exit code 3"),
        ("import os\nos._exit(9)\n", None, "exited with code 9"),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
            None,
            "was ended by signal 11",
        ),
        (
            "import storm_dagster\nstorm_dagster.submit_topology('x', {}, None)\n",
            None,
            "while the module was being described",
        ),
        (
            COMPONENTS + "\nclass Empty(Topology):\n    count = Count.spec(inputs=['nobody'])\n",
            None,
            "no spout",
        ),
    ],
)
def test_bad_modules_are_refused(tmp_path: Path, text: str, name: str | None, output: str) -> None:
    target = write(tmp_path / "bad_target.py", text)
    message = refused(f"{target}:{name}" if name else target)
    assert output in message
    assert "bad_target" in message


def test_a_hanging_module_is_ended_with_all_it_started(tmp_path: Path) -> None:
    text = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(300)\n"
    )
    assert "was not described within" in refused(write(tmp_path / "hang.py", text), timeout=3.0)
    pid = int((tmp_path / "pid").read_text())

    def gone() -> bool:
        # A busy machine takes its time to end what is killed, and this process may not be the one
        # that reaps it.
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(gone, 30, "the end of what the module started")


def test_packages_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "shop" / "__init__.py", "")
    write(tmp_path / "shop" / "parts.py", COMPONENTS)
    write(
        tmp_path / "shop" / "flows.py",
        "from .parts import *\nclass Flow(Topology):\n    words = Words.spec()\n",
    )
    monkeypatch.chdir(tmp_path)
    found = describe_target("shop.flows:Flow")
    assert found.name == "flows" and found.root == tmp_path and found.include == ["shop"]
    assert found.topology.spouts["words"].object.python == "shop.parts:Words"
    assert "is not importable" in refused("shop.nothing")
    assert "is not importable" in refused("no_such_package.module")


def test_an_error_names_the_line_of_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised in a folder beside it, whose name begins with that of its own folder."""
    write(tmp_path / "shop_tools" / "prices.py", "def read():\n    raise ValueError('no price')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shop_tools"), prepend=os.pathsep)
    text = "import prices\n\ndef make():\n    return prices.read()\n"
    target = write(tmp_path / "shop" / "flow.py", text)
    assert f"make raised ValueError: no price ({target}, line 4)" in refused(f"{target}:make")


def test_a_file_that_shadows_a_module_is_refused(tmp_path: Path) -> None:
    assert "rename the file" in refused(write(tmp_path / "json.py", ONE))


def test_a_topology_is_described_from_an_archive_and_bad_archives_are_refused(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "src" / "flow.py", ONE)
    for name in ("a.zip", "a.jar", "a.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as bundle:
            bundle.write(source, "flow.py")
        assert describe_target(f"{tmp_path / name}::flow").name == "flow"
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as bundle:
        bundle.add(source, "flow.py")
    assert describe_target(f"{tmp_path / 'a.tar.gz'}::flow:WordCount").name == "flow"
    assert "is not importable" in refused(f"{tmp_path / 'a.zip'}::other")
    write(tmp_path / "fake.zip", "this is no zip")
    assert refused(f"{tmp_path / 'fake.zip'}::flow")
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as bundle:
        bundle.writestr("../outside.py", "x = 1")
    assert "points outside" in refused(f"{tmp_path / 'evil.zip'}::flow")
    assert not (tmp_path / "outside.py").exists()


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("missing.py", "does not exist"),
        ("missing.zip::flow", "does not exist"),
        ("archive.zip", "names no module"),
        ("thing.rar::flow", "is not an archive"),
        ("a b", "is neither"),
        ("", "is neither"),
        ("pkg.mod:1x", "is not a Python name"),
        ("../escape", "is neither"),
    ],
)
def test_texts_that_name_nothing(
    tmp_path: Path, text: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match=output):
        parse_target(text)


def test_a_folder_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "x.py").mkdir()
    with pytest.raises(InvalidRequest, match="is a folder"):
        parse_target(str(tmp_path / "x.py"))
