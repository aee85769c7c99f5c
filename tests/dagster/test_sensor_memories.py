"""Memories of the sensors: records and cursors that were stored before load again, byte for
byte.
"""

from __future__ import annotations

from msgspec import UNSET

from storm_dagster.core.liveness.causes import (
    FirstSeen,
    LivenessMemory,
    MissingSlot,
    StartingWorker,
    TopologyMemory,
)
from storm_dagster.core.liveness.retries import TopologyAttempts
from storm_dagster.core.transitions import DueMemory
from storm_dagster.defs.healing.memory import HealingCursor, HealingMemory
from storm_dagster.defs.lifecycle.sensor import LifecycleMemory
from storm_dagster.zk.sensor_memory import decode_memory

HEALING = (
    b'{"alarm":"4 of 9 workers vanished","asked":{},"attempts":{"wc-1-1:3:dead_worker@s1-6700":[2,104.0]},'
    b'"liveness":{"boot_id":"b","cold":true,"frozen_since":97.0,"since":90.5,"supervisors":{},'
    b'"topologies":{"wc-1-1":{"assignment":[3,91.0],"beats":[-2,0.0],'
    b'"missing":{"s1:6700":[95.25,true,1700000000]},"starting":{"s2:6700":[96.0,"0123abcd"]}}}},'
    b'"observed":{"wc-1-1":[2,99.0]},"recovering":{"wc-1-1":[3,95.25],"x-2-1":[1,null]},"tries":{"wc-1-1":[3,102.0,[40.0]]},"used":{"wc-1-1:3:dead_worker@s1-6700":2},'
    b'"workers":{"wc-1-1":{"s2:6700":"0123abcd"}}}'
)
LIFECYCLE = b'{"alive": ["wc"], "due": {"boot_id": "b", "seen": {"wc-1-1": [12, 34.5]}}}'


def test_the_healing_record_keeps_its_form() -> None:
    memory = HealingMemory(
        liveness=LivenessMemory(
            boot_id="b",
            since=90.5,
            topologies={
                "wc-1-1": TopologyMemory(
                    FirstSeen(3, 91.0),
                    FirstSeen(20, 99.5),
                    {"s1:6700": MissingSlot(95.25, True, 1700000000)},
                    {"s2:6700": StartingWorker(96.0, "0123abcd")},
                )
            },
            supervisors={"s1": FirstSeen(7, 99.0)},
            frozen_since=97.0,
            cold=True,
        ),
        attempts={"wc-1-1:3:dead_worker@s1-6700": (2, 104.0)},
        polled_at=100.0,
        alarm="4 of 9 workers vanished",
        used={"wc-1-1:3:dead_worker@s1-6700": 2},
        workers={"wc-1-1": {"s2:6700": "0123abcd"}},
        recovering={"wc-1-1": (3, 95.25), "x-2-1": (1, None)},
        topology_attempts={"wc-1-1": TopologyAttempts(3, 102.0, (40.0,))},
        observed={"wc-1-1": (2, 99.0)},
    )
    assert memory.to_record() == HEALING
    assert decode_memory(HealingMemory, HEALING).to_record() == HEALING
    assert decode_memory(HealingMemory, HEALING).recovering == memory.recovering


def test_a_record_of_an_earlier_release_is_read() -> None:
    """It has the last requests in ``asked``, and no ``tries``."""
    requests = b'"asked":{"wc-1-1:3:dead_worker@s1-6700":[104.0,"0123456789ab"]}'
    tries = b'"tries":{"wc-1-1":[3,102.0,[40.0]]},'
    former = HEALING.replace(b'"asked":{}', requests).replace(tries, b"")
    memory = decode_memory(HealingMemory, former)
    assert memory.used == {"wc-1-1:3:dead_worker@s1-6700": 2}
    assert memory.attempts == {"wc-1-1:3:dead_worker@s1-6700": (2, 104.0)}
    assert memory.topology_attempts is UNSET


def test_damaged_records_are_empty_memories() -> None:
    for raw in (
        None,
        b"",
        b"{}",
        b"[]",
        HEALING[:-1],
        HEALING.replace(b'"alarm"', b'"alarms"'),
        b"\xff",
    ):
        assert decode_memory(HealingMemory, raw) == HealingMemory()


def test_the_lifecycle_record_keeps_its_form() -> None:
    memory = LifecycleMemory(DueMemory("b", {"wc-1-1": (12, 34.5)}), ("wc",))
    assert decode_memory(LifecycleMemory, LIFECYCLE) == memory


def test_a_cursor_names_its_record_and_the_last_poll() -> None:
    stored = '{"memory": "12-0123456789abcdef", "looked_at": 34.5}'
    text = HealingCursor("heartbeat_sensor", stored).after(HealingMemory(polled_at=34.5))
    assert text == '{"looked_at":34.5,"memory":"12-0123456789abcdef"}'
    for damaged in ("", "{", "[1]", "{}"):
        text = HealingCursor("heartbeat_sensor", damaged).after(HealingMemory())
        assert text == '{"looked_at":null,"memory":null}'
