"""A crash loop that lasts leaves no event for each minute of it. Runs of healing are bounded in
``core/test_worthwhile_attempts.py``.
"""

from __future__ import annotations

from storm_dagster.defs.healing.memory import Restart, limit_observations

DAY = 86_400


def test_a_crash_loop_is_observed_less_and_less() -> None:
    observed: dict[str, tuple[int, float]] = {}
    seen = {"loops": 0, "once": 0}
    for now in range(0, DAY, 60):
        found = [Restart("t", "loops", "s1", "h", port, 1) for port in (1, 2)]
        found += [Restart("u", "once", "s1", "h", 1, 1)] if now == 60 * 700 else []
        kept, observed = limit_observations(found, observed, float(now))
        for name in seen:
            seen[name] += any(each.topology_id == name for each in kept)
        assert len([each for each in kept if each.topology_id == "loops"]) in (0, 2)
    assert seen["once"] == 1 and 24 <= seen["loops"] <= 40
