"""References in a topology's conf are resolved in its workers, and nowhere else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import storm_dagster
from storm_dagster.host.references import resolve_references
from storm_dagster.model.errors import InvalidRequest


def test_values_at_any_depth_are_resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DB_PASSWORD", "planted ${env:HOME}")
    secret = tmp_path / "secret"
    secret.write_text("from a file\n")
    given: dict[str, Any] = {
        "db.url": "mysql://u:${env:DB_PASSWORD}@h",
        "db": [{"key": f"${{file:{secret}}}"}, 7, None, True],
        "plain": "$HOME ${HOME} ${other:x}",
    }
    assert resolve_references(given) == {
        "db.url": "mysql://u:planted ${env:HOME}@h",
        "db": [{"key": "from a file"}, 7, None, True],
        "plain": given["plain"],
    }


@pytest.mark.parametrize(
    "value", ["${env:NOT_THERE}", "${env:}", "${file:/not/there}", "${file:/}", "${file:\0}"]
)
def test_an_error_names_the_key(value: str) -> None:
    with pytest.raises(InvalidRequest, match=r"conf key 'db\.nested' refers to \$\{"):
        resolve_references({"db": {"nested": [value]}})


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_text("x" * 2_000_000)
    with pytest.raises(InvalidRequest, match=r"'k'.*more than"):
        resolve_references({"k": f"${{file:{tmp_path}/large}}"})


def test_only_workers_resolve() -> None:
    root = Path(storm_dagster.__file__).parent
    found = subprocess.run(
        ["grep", "-rl", "resolve_references", root], capture_output=True, text=True, check=True
    )
    names = {
        Path(line).relative_to(root).as_posix()
        for line in found.stdout.split()
        if line.endswith(".py")
    }
    assert names == {"host/references.py", "local/code.py", "worker/runtime/process.py"}
