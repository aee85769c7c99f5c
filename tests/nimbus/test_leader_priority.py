"""Who may lead, by the blobs that each nimbus misses."""

from __future__ import annotations

from storm_dagster.core.leader_priority import leader_decision, needed_blobs

KEYS = {"t-1-1-stormjar.jar", "t-1-1-stormconf.ser", "t-1-1-stormcode.ser"}


def allowed(me: str, missing: int, others: dict[str, int], vacant: float = 0.0) -> bool:
    return leader_decision(me, missing, others, vacant_secs=vacant).allowed


def test_empty_cluster_leads_at_once() -> None:
    assert needed_blobs([], []) == set()
    assert allowed("n1:1", 0, {})


def test_complete_nimbus_leads_at_once_and_the_lagging_one_declines() -> None:
    assert allowed("n2:1", 0, {"n3:1": 1})
    assert not allowed("n3:1", 1, {"n2:1": 0}, vacant=59)


def test_a_better_one_that_never_leads_is_not_waited_for() -> None:
    assert allowed("n3:1", 1, {"n2:1": 0}, vacant=60)
    assert "degraded" in leader_decision("n3:1", 1, {"n2:1": 0}, vacant_secs=86_400).reason


def test_fewest_missing_leads_after_the_grace() -> None:
    assert not allowed("n2:1", 2, {"n3:1": 1}, vacant=59)
    assert not allowed("n3:1", 1, {"n2:1": 2}, vacant=1)
    assert allowed("n3:1", 1, {"n2:1": 2}, vacant=60)


def test_equal_is_not_fewer() -> None:
    assert allowed("n2:1", 1, {"n3:1": 1}, vacant=60)
    assert allowed("n3:1", 1, {"n2:1": 1}, vacant=60)


def test_nobody_is_blocked_for_ever_by_a_topology_that_nobody_holds() -> None:
    decision = leader_decision("n1:1", 3, {"n1:1": 0}, vacant_secs=60)
    assert decision.allowed and "degraded" in decision.reason, (
        "one's own stale entry does not count"
    )


def test_needed_blobs() -> None:
    registered = {*KEYS, "t-1-1-placement.json", "gone-1-1-stormjar.jar", "staging.x.conf"}
    needed = needed_blobs(["t-1-1"], registered)
    assert needed == KEYS | {"t-1-1-placement.json"}
    assert needed_blobs(["t-1-1"], []) == KEYS
