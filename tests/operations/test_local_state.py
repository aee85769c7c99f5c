"""What pages say of state that stays on its host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from storm_dagster.model.records import StateHome
from storm_dagster.operations.read.explaining import local_state_problems


def test_local_state_on_several_hosts_is_a_problem_that_pages_name() -> None:
    def on(*hosts: str) -> Any:
        return SimpleNamespace(workers=[SimpleNamespace(host=host) for host in hosts])

    home = StateHome(marker="", local=("alpha", "beta"))
    (text,) = local_state_problems(on("alpha", "beta", "beta"), home)
    assert "alpha, beta" in text and "topology.state.local" in text and "topology.state.dir" in text
    assert local_state_problems(on("alpha", "alpha"), home) == []
    assert local_state_problems(on("alpha", "beta"), StateHome(marker="x")) == []
    assert local_state_problems(on(), home) == []
