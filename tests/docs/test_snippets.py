"""Every snippet of the README and the documents is run, or checked by what would run it.

``python`` blocks of one page run in order in one process and one folder; a block whose first line
is ``# name.py`` is a file there, which later blocks import. ``yaml`` blocks say on their first line
what they are; those in a folder of definitions are files of the page's project. ``console`` blocks
name verbs and options that exist. What stands after ``<!-- not run: why -->`` is compiled only.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

from storm_dagster.cli.app import VERBS, cli

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(
    r"(?P<mark><!-- not run: [^>]+ -->\s*\n)?^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    flags=re.S | re.M,
)


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str
    code: str
    is_run: bool

    @property
    def file_name(self) -> str | None:
        """``wc.py`` when the first line is ``# wc.py``."""
        found = re.match(r"# (?P<name>[\w./-]+\.(py|yaml))\s*$", self.code.split("\n", 1)[0])
        return found["name"] if found else None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets_of(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        indent = match["indent"]
        code = "".join(
            line.removeprefix(indent) for line in match["code"].splitlines(keepends=True)
        )
        line = text.count("\n", 0, match.start("code"))
        found.append(Snippet(page, line, match["language"], code, match["mark"] is None))
    return found


ALL = [snippet for page in PAGES for snippet in snippets_of(page)]
PYTHON_PAGES = [
    page for page in PAGES if any(item.language == "python" and item.page == page for item in ALL)
]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    script = ["import sys", "sys.path.insert(0, '.')"]
    _write_project(page, tmp_path)
    for number, snippet in enumerate(
        item for item in snippets_of(page) if item.language == "python"
    ):
        compile(snippet.code, str(snippet), "exec")
        if not snippet.is_run:
            continue
        name = snippet.file_name or f"snippet_{number}.py"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(snippet.code, encoding="utf-8")
        # A named file is a module (whose classes can be submitted); any other block is a script.
        if snippet.file_name:
            script.append(f"import {name[:-3].replace('/', '.')}  # {snippet}")
        else:
            script.append(f"exec(compile(open({name!r}).read(), {str(snippet)!r}, 'exec'), {{}})")
    (tmp_path / "all_of_the_page.py").write_text("\n".join(script) + "\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "all_of_the_page.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _write_project(page: Path, root: Path) -> None:
    """Write the ``yaml`` files in folders of definitions, and a `pyproject.toml` for them."""
    for snippet in snippets_of(page):
        name = snippet.file_name
        if snippet.language != "yaml" or name is None or "/defs/" not in name:
            continue
        package = name.partition("/")[0]
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(snippet.code, encoding="utf-8")
        for folder in (package, f"{package}/defs"):
            (root / folder / "__init__.py").touch()
        lines = [
            "[tool.dg]",
            'directory_type = "project"',
            "[tool.dg.project]",
            f'root_module = "{package}"',
        ]
        (root / "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")


def _commands() -> list[tuple[str, str]]:
    found = []
    for snippet in ALL:
        if snippet.language not in ("console", "bash", "shell", "sh"):
            continue
        for line in snippet.code.replace("\\\n", " ").splitlines():
            command = re.sub(r"^(\w+@\w+)?\$ ", "", line).split("  #")[0].strip()
            if command.startswith("storm-dagster "):
                found.append((str(snippet), command))
    return found


@pytest.mark.parametrize(("place", "line"), _commands(), ids=lambda value: value)
def test_a_command_is_accepted(place: str, line: str) -> None:
    arguments = shlex.split(line.split(" | ")[0].split(" > ")[0].split(" && ")[0])[1:]
    if arguments[0].startswith("-"):
        return
    verb, *rest = arguments
    assert "#" not in rest, f"{place}: two spaces stand before a comment: {line}"
    assert verb in VERBS, f"{place}: no verb {verb!r}"
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    while isinstance(command, click.Group):
        verb, *rest = rest
        command = command.get_command(click.Context(command), verb)
        assert command is not None, f"{place}: no such verb: {line}"
    if "--help" in rest:
        return
    command.make_context(verb, list(rest), resilient_parsing=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_with_commands_names_its_language(page: Path) -> None:
    """A block without a language is checked by nothing."""
    blocks = re.findall(
        r"^ *```(\w*)[^\n]*\n(.*?)^ *```", page.read_text(encoding="utf-8"), flags=re.S | re.M
    )
    assert [
        code
        for language, code in blocks
        if not language and re.search(r"^ *(\$|storm-dagster) ", code, re.M)
    ] == []


def test_the_units_of_the_production_page_run_verbs() -> None:
    text = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    assert "storm-dagster daemon %i --conf-dir" in text
    started = set(re.findall(r"systemctl enable --now storm@(\S+)", text))
    daemon = cli.get_command(click.Context(cli), "daemon")
    assert isinstance(daemon, click.Group)
    assert started == {"spark", "nimbus", "supervisor"} and started <= set(daemon.commands)
    assert started == set(re.findall(r"systemctl stop storm@(\S+)", text))


CONF_KEY = re.compile(
    r"`((?:storm|nimbus|supervisor|worker|topology|spark|dagster)(?:\.[a-z_]+)+)(?:[:=][^`]*)?`"
)
NO_CONF = {
    *("storm.yaml", "storm.d", "dagster.yaml", "spark.jars.packages", "spark.executor.memory"),
    *("spark.sql.extensions", "spark.sql.shufle.partitions", "spark.executor.memry"),
    "spark.sql.shuffle.partitions",
    "topology.metrics.reporters",
}
"""Files, keys of Spark's own, and one that docs/migration.md says not to exist."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_conf_key_exists(page: Path) -> None:
    from storm_dagster.model.conf import CONF_KEYS, keys_without_meaning
    from storm_dagster.model.removed_keys import REMOVED_KEYS

    text = page.read_text(encoding="utf-8")
    named = set(CONF_KEY.findall(text))
    for snippet in snippets_of(page):
        if snippet.file_name == "storm.yaml":
            named |= set(yaml.safe_load(snippet.code))
    if page.name == "upgrade-cluster.md":
        assert named >= REMOVED_KEYS.keys(), f"{page.name} does not name all removed keys"
        named -= REMOVED_KEYS.keys()
    assert not named - set(CONF_KEYS) - keys_without_meaning().keys() - NO_CONF, (
        f"{page.name} names conf keys that do not exist"
    )


YAML = [item for item in ALL if item.language == "yaml"]


@pytest.mark.parametrize("snippet", YAML, ids=str)
def test_yaml_is_what_it_says(snippet: Snippet, tmp_path: Path) -> None:
    document = yaml.safe_load(snippet.code)
    assert document, snippet
    if not snippet.is_run or snippet.file_name is None:
        return
    match Path(snippet.file_name).name:
        case "plan.yaml":
            from storm_dagster.model.plan_document import decode_plan

            assert decode_plan(document, str(snippet)).topologies
        case "storm.yaml":
            from storm_dagster.model.conf import validate_conf

            validate_conf(document, source=str(snippet))
        case "defs.yaml":
            from storm_dagster import StormTopologyComponent

            assert document["type"] == "storm_dagster.StormTopologyComponent"
            known = StormTopologyComponent.model_fields
            assert set(document["attributes"]) <= set(known), set(document["attributes"]) - set(
                known
            )
