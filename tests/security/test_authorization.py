"""Who may do what: an empty list means nobody."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from storm_dagster.core.authorization import CLUSTER, Caller, authorize
from storm_dagster.http.authentication import groups_of, operation_of
from storm_dagster.model.errors import NotAuthorized

OPERATIONS = ("list", "submit", "topology", "admin")
LISTS = (
    "nimbus.admins",
    "nimbus.admins.groups",
    "nimbus.users",
    "nimbus.groups",
    "topology.users",
    "topology.groups",
)
ANN = Caller("ann", groups=frozenset({"staff"}))


def allowed(
    caller: Caller, operation: Any, conf: dict[str, Any], topology: dict[str, Any] | None
) -> bool:
    try:
        authorize(caller, operation, conf, topology)
    except NotAuthorized:
        return False
    return True


@pytest.mark.parametrize("absent", [None, [], "missing"])
def test_every_combination_of_lists(absent: Any) -> None:
    """All 64 combinations of lists that name the caller and lists that are absent or empty."""
    for named in itertools.product((False, True), repeat=len(LISTS)):
        conf: dict[str, Any] = {}
        for key, present in zip(LISTS, named, strict=True):
            if present:
                conf[key] = ["staff"] if key.endswith("groups") else ["ann"]
            elif absent != "missing":
                conf[key] = absent
        on = dict(zip(LISTS, named, strict=True))
        admin = on["nimbus.admins"] or on["nimbus.admins.groups"]
        user = on["nimbus.users"] or on["nimbus.groups"]
        owner = on["topology.users"] or on["topology.groups"]
        assert allowed(ANN, "admin", conf, None) == admin
        assert (
            allowed(ANN, "list", conf, None)
            == allowed(ANN, "submit", conf, None)
            == (admin or user)
        )
        assert allowed(ANN, "topology", conf, conf) == (admin or owner)
        assert allowed(ANN, "topology", conf, None) == admin, (
            "of what does not run only administrators hear"
        )
        outsider = Caller("eve")
        assert not any(allowed(outsider, each, conf, conf) for each in OPERATIONS)
        assert all(allowed(CLUSTER, each, conf, None) for each in OPERATIONS)


def test_the_lists_of_a_topology_do_not_open_the_cluster() -> None:
    greedy = {"topology.users": ["ann"], "nimbus.admins": ["ann"], "nimbus.users": ["ann"]}
    assert allowed(ANN, "topology", {}, greedy)
    assert not allowed(ANN, "admin", {}, greedy) and not allowed(ANN, "submit", {}, greedy)


@pytest.mark.parametrize(
    "user", ["x;touch p", "`id`", "$(id)", "a\nb", "a\0b", "", "-rf", "no-such-user-here"]
)
def test_groups_are_looked_up_without_a_command(user: str) -> None:
    assert groups_of(user) == frozenset()


def test_groups_of_a_user_of_this_machine() -> None:
    assert "root" in groups_of("root")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1/topologies", ("list", None)),
        ("GET", "/api/v1/topology/summary", ("list", None)),
        ("POST", "/v1/submit", ("submit", None)),
        ("PUT", "/v1/uploads/h/conf", ("submit", None)),
        ("GET", "/v1/topologies/wc", ("topology", "wc")),
        ("POST", "/v1/topologies/wc/kill", ("topology", "wc")),
        ("POST", "/api/v1/topology/wc-1-2/kill/3", ("topology", "wc-1-2")),
        ("GET", "/api/v1/supervisor", ("admin", None)),
        ("GET", "/v1/cluster", ("admin", None)),
        ("GET", "/v1/blobs/k", ("admin", None)),
        ("PUT", "/v1/replicas/k", ("admin", None)),
        ("POST", "/v1/topologies", ("admin", None)),
        ("GET", "/api/v1/cluster/configuration", ("admin", None)),
        ("GET", "/v1/topologies/", ("admin", None)),
        ("GET", "/v1//topologies/wc", ("admin", None)),
        ("GET", "/anything/new", ("admin", None)),
    ],
)
def test_what_is_not_known_is_for_administrators(method: str, path: str, expected: Any) -> None:
    assert operation_of(method, path) == expected
