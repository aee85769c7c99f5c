"""Each start of a local cluster has identities of its own, which follow from the key of HOME."""

from __future__ import annotations

from pathlib import Path

import pytest

from storm_dagster.model.errors import Corrupt, InvalidRequest
from storm_dagster.security.home_key import begin_start, identity_of_start, start_number

PURPOSE = "spark connect"


def test_each_start_and_each_purpose_has_its_own_identity(tmp_path: Path) -> None:
    identities: set[str] = set()
    for expected in (1, 2, 3):
        assert begin_start(tmp_path) == expected
        assert start_number(tmp_path) == expected
        identities |= {identity_of_start(tmp_path, purpose) for purpose in (PURPOSE, "zookeeper")}
    assert len(identities) == 6
    assert all(len(identity) == 64 for identity in identities)


def test_all_processes_of_a_start_derive_the_same_identity(tmp_path: Path) -> None:
    begin_start(tmp_path)
    first = identity_of_start(tmp_path, PURPOSE)
    assert identity_of_start(tmp_path, PURPOSE) == first
    begin_start(tmp_path)
    assert identity_of_start(tmp_path, PURPOSE) != first
    assert identity_of_start(tmp_path, PURPOSE, number=1) == first, "what it opened stays open"


def test_another_home_has_other_identities(tmp_path: Path) -> None:
    identities: set[str] = set()
    for name in ("one", "two"):
        home = tmp_path / name
        home.mkdir()
        begin_start(home)
        identities.add(identity_of_start(home, PURPOSE))
    assert len(identities) == 2


def test_nobody_else_reads_the_key(tmp_path: Path) -> None:
    begin_start(tmp_path)
    key = tmp_path / "home.key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o640)
    for use in (lambda: identity_of_start(tmp_path, PURPOSE), lambda: begin_start(tmp_path)):
        with pytest.raises(InvalidRequest, match="chmod 600"):
            use()
    assert start_number(tmp_path) == 1, "a start that was refused is not counted"


def test_damaged_files_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"home\.key cannot be read"):
        identity_of_start(tmp_path, PURPOSE)
    begin_start(tmp_path)
    (tmp_path / "start.number").write_text("one\n", encoding="ascii")
    with pytest.raises(Corrupt, match="a number above that of all starts"):
        begin_start(tmp_path)
    (tmp_path / "start.number").write_text("7\n", encoding="ascii")
    assert begin_start(tmp_path) == 8
    (tmp_path / "home.key").write_text("\n", encoding="ascii")
    with pytest.raises(Corrupt, match="a start makes one"):
        identity_of_start(tmp_path, PURPOSE)
