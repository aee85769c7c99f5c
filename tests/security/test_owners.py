"""Who submits a topology owns it, and a limited user changes no topology of others, whatever the
call is named.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from storm_dagster.core.submission.conf import limited_conf
from storm_dagster.model.errors import NotAuthorized
from storm_dagster.nimbus.thrift.service import Access, ThriftPeer, operation_of
from storm_dagster.security.settings import Security

_ACL = {"topology.users": ["alice"]}
_CHANGES: list[dict[str, Any]] = [
    {"topology.hot.deploy.enable": True},
    {"topology.upgrade": True},
    {"topology.upgrade": True, "topology.upgrade.worker.num": 1},
    {"topology.hot.deploy.enable": "yes"},
]


@pytest.mark.parametrize("method", ["submitTopology", "submitTopologyWithOpts"])
@pytest.mark.parametrize(
    "conf", [*_CHANGES, {}, {"topology.workers": 2}, {"topology.upgrade": False}]
)
def test_a_conf_that_makes_a_submission_a_change_is_authorized_as_one(
    method: str, conf: dict[str, Any]
) -> None:
    expected = "topology" if conf in _CHANGES else "submit"
    assert operation_of(method, ["billing", "place", json.dumps(conf), None]) == expected
    assert operation_of(method, ["billing", "place", "no json", None]) == "submit"


def test_a_submitter_replaces_no_topology_of_another() -> None:
    conf = {"nimbus.users": ["alice", "mallory"]}
    access = Access(
        Security.of({"storm.secret": "x" * 32}), conf, lambda name: _ACL, lambda user: frozenset()
    )
    stolen = [
        "billing",
        "place",
        json.dumps({"topology.hot.deploy.enable": True, "topology.users": ["mallory"]}),
        None,
    ]
    access.check(ThriftPeer(user="mallory"), "submitTopology", ["own", "place", "{}", None])
    access.check(ThriftPeer(user="alice"), "submitTopology", stolen)
    with pytest.raises(NotAuthorized, match="'mallory'"):
        access.check(ThriftPeer(user="mallory"), "submitTopology", stolen)


def test_lists_of_a_topology_stay_as_they_are() -> None:
    former = {
        **limited_conf("alice", {"topology.users": ["bob"]}, None),
        "topology.groups": ["ops"],
    }
    assert (
        former["topology.users"] == ["alice", "bob"]
        and former["topology.submitter.user"] == "alice"
    )
    for given in ({}, {"topology.users": ["bob"]}, {"topology.submitter.user": "bob"}):
        assert limited_conf("bob", given, former) == former
    for key in ("topology.users", "topology.groups"):
        with pytest.raises(NotAuthorized, match=f"'bob' must not change {key}"):
            limited_conf("bob", {key: ["mallory"]}, former)
