"""The expiring map, with Storm's figures and time as an argument."""

from __future__ import annotations

import pytest

from storm_dagster.nimbus.time_cache_map import TimeCacheMap


def removal_time(put_at: float, expiry: float, step: float = 0.05) -> float:
    """When an entry put at ``put_at`` is removed from a map that was made at 0."""
    expired: list[str] = []
    cache: TimeCacheMap[str, int] = TimeCacheMap(
        expiry, now=0.0, limit=9, on_expire=lambda key, _: expired.append(key)
    )
    tick = 0
    now = 0.0
    inserted = False
    while not expired:
        now = round(tick * step, 6)
        if not inserted and now >= put_at:
            cache.put("k", 1)
            inserted = True
        cache.advance(now)
        tick += 1
        assert now < 10 * expiry
    return now


@pytest.mark.parametrize(
    ("put_at", "removed_at"), [(0.0, 45), (14.9, 45), (14.95, 45), (15.05, 60)]
)
def test_an_entry_goes_with_the_rotation_after_its_time(put_at: float, removed_at: float) -> None:
    assert removal_time(put_at, 30) == removed_at


def test_age_lies_between_expiry_and_one_rotation_more() -> None:
    expiry = 12.0
    for tenth in range(0, 130, 7):
        age = removal_time(tenth / 10, expiry) - tenth / 10
        assert expiry <= age + 1e-6 and age <= expiry * 3 / 2 + 1e-6


def test_put_and_touch_restart_the_life_get_does_not() -> None:
    cache: TimeCacheMap[str, int] = TimeCacheMap(30, now=0, limit=9)
    for key in ("put", "touch", "get"):
        cache.put(key, 1)
    for now in (15, 30):
        cache.advance(now)
        cache.put("put", 2)
        assert cache.touch("touch") == 1
        assert cache.get("get") == 1
    cache.advance(45)
    assert cache.build_map() == {"put": 2, "touch": 1}
    assert cache.get("get") is None and cache.touch("get") is None and "get" not in cache


def test_an_active_transfer_never_expires_and_an_idle_one_is_closed() -> None:
    closed: list[str] = []
    cache: TimeCacheMap[str, str] = TimeCacheMap(
        30, now=0, limit=9, on_expire=lambda key, _: closed.append(key)
    )
    cache.put("active", "a")
    cache.put("idle", "i")
    for now in range(0, 600, 29):
        cache.advance(now)
        assert cache.touch("active") == "a"
    assert closed == ["idle"]


def test_remove_returns_the_value_without_the_callback() -> None:
    expired: list[str] = []
    cache: TimeCacheMap[str, int] = TimeCacheMap(
        30, now=0, limit=9, on_expire=lambda key, _: expired.append(key)
    )
    cache.put("k", 7)
    assert cache.remove("k") == 7 and cache.remove("k") is None
    cache.advance(1000)
    assert expired == []


def test_callback_runs_after_the_entry_has_left_and_may_fail() -> None:
    seen: list[bool] = []
    cache: TimeCacheMap[str, int] = TimeCacheMap(
        30, now=0, limit=9, on_expire=lambda key, _: callback(key)
    )

    def callback(key: str) -> None:
        seen.append(key in cache)
        raise RuntimeError("closing failed")

    cache.put("a", 1)
    cache.put("b", 2)
    cache.advance(45)
    assert seen == [False, False] and len(cache) == 0


def test_merged_view_counts_all_buckets() -> None:
    cache: TimeCacheMap[str, int] = TimeCacheMap(30, now=0, limit=9)
    cache.put("a", 1)
    cache.advance(15)
    cache.put("b", 2)
    assert (
        cache.build_map() == {"a": 1, "b": 2} and len(cache) == 2 and "a" in cache and "b" in cache
    )


def test_a_long_pause_expires_everything_at_once() -> None:
    cache: TimeCacheMap[str, int] = TimeCacheMap(30, now=0, limit=9)
    cache.put("a", 1)
    cache.advance(1e9)
    assert len(cache) == 0
    cache.put("b", 1)
    cache.advance(1e9 + 14.9)
    assert "b" in cache
    cache.advance(1e9 + 100)
    assert len(cache) == 0


def test_a_full_map_refuses_new_keys_but_refreshes_old_ones() -> None:
    cache: TimeCacheMap[int, int] = TimeCacheMap(30, now=0, limit=2)
    assert cache.put(1, 1) and cache.put(2, 2) and not cache.put(3, 3) and cache.put(1, 4)
    assert cache.build_map() == {1: 4, 2: 2}
