"""Users who are no administrators, at every route of a running nimbus: nothing of others changes by
what they send.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import httpx
import msgspec
import pytest

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.model.access_tokens import TokenScope
from storm_dagster.model.dagster_events import DagsterEvent, target_key
from storm_dagster.model.verbs import VERBS
from storm_dagster.nimbus.blobs.uploads import MAX_PER_USER
from storm_dagster.operations.submit.staging import (
    allocate_topology_id,
    read_client_token,
    upload_key,
)
from storm_dagster.security.settings import Security
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.acting import submit
from storm_rigs.protocols.tokens import recorded_token
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import ARCHIVE, WORD_COUNT, World

pytestmark = pytest.mark.zookeeper
SECRET = "a-secret-planted-for-tests-4711"
KEYS = ("storm.tls.cert", "storm.tls.key", "storm.tls.ca", "storm.secret", "nimbus.users")
PARTS = ("archive", "conf", "topology")


class Secured:
    """A nimbus with TLS, a secret and users; its state and its blobs as the cluster sees them."""

    def __init__(self, nimbus: NimbusThread, certificate: Callable[..., dict[str, str]]) -> None:
        self.nimbus = nimbus
        self.certificate = certificate
        self.admin = nimbus.client()

    def user(self, name: str) -> httpx.Client:
        return self.nimbus.client(Security.of(self.certificate(name)))

    def upload(self, http: httpx.Client) -> str:
        """A handle whose parts are all there."""
        handle = http.post("/v1/uploads").json()["handle"]
        for part in PARTS:
            assert http.put(f"/v1/uploads/{handle}/{part}", content=ARCHIVE).status_code == 201
        return handle

    @contextmanager
    def world(self) -> Iterator[World]:
        """The cluster as an operation sees it."""
        conf = self.nimbus.conf
        cluster = StormClusterState.open(conf)
        try:
            with NimbusBlobClient(self.nimbus.url, security=Security.of(conf)) as blobs:
                yield World(cluster, blobs, dict(conf.values))  # type: ignore[arg-type]
        finally:
            cluster.disconnect()


@pytest.fixture
def secured(stage: Stage, certificate: Callable[..., dict[str, str]]) -> Iterator[Secured]:
    keys = {**certificate(), "storm.secret": SECRET, "nimbus.users": ["ann", "eve"]}
    assert keys.keys() == {*KEYS}
    found = Secured(stage.nimbus(conf=keys).await_leading(), certificate)
    yield found
    found.admin.close()


def state_of(world: World) -> dict[str, tuple[bytes, int]]:
    """All nodes of topologies, staging and blobs, with their versions."""
    found: dict[str, tuple[bytes, int]] = {}

    def walk(path: str) -> None:
        children = world.cluster.state.find_children_many([path])[0] or []
        for child in children:
            walk(f"{path}/{child}".replace("//", "/"))
        if (node := world.cluster.state.get_many([path])[0]) is not None:
            found[path] = (node[0], node[1].version)

    walk("/")
    return found


def test_no_route_changes_a_topology_of_another(secured: Secured) -> None:
    with secured.world() as world, secured.user("ann") as ann:
        world.supervisor("s1")
        billing = world.submit(
            "billing", conf={"topology.users": ["bob"], "topology.submitter.user": "bob"}
        )
        world.run_workers(billing)
        values: dict[str, tuple[str, ...]] = {
            "name": ("billing", billing),
            "id": ("billing", billing),
            "verb": (*VERBS, "events"),
            "component": ("split",),
            "slot": tuple(f"{host}:{port}" for host, port in world.cluster.live_workers(billing)),
            "handle": (secured.upload(secured.admin),),
            "part": PARTS,
            "key": tuple(world.blobs.keys(billing)),
            "sha256": (hashlib.sha256(ARCHIVE).hexdigest(),),
            "run_id": ("0" * 36,),
            "owner": ("bob",),
            "action": ("enable",),
            **dict.fromkeys(("wait", "percent", "minutes"), ("0",)),
        }
        scopes: tuple[TokenScope, ...] = ("read", "read:tuples", "metrics")
        tokens = {scope: recorded_token(secured.admin, SECRET, scope) for scope in scopes}
        before = state_of(world)
        served: set[tuple[str, str]] = set()
        for path, operations in secured.admin.get("/openapi.json").json()["paths"].items():
            names = re.findall(r"\{(\w+)\}", path)
            # Of a parameter that is new, this test must know what would be of another.
            for given, method in product(
                product(*(values[name] for name in names)), {*operations, "post", "delete"}
            ):
                place = path.format(**dict(zip(names, given, strict=True)))
                what: dict[str, Any] = {
                    "json": {},
                    "params": {"topoId": billing, "file": f"{billing}/6900/worker.log"},
                }
                for scope, token in tokens.items() if method != "get" else ():
                    answer = secured.admin.request(
                        method, place, headers={"Authorization": f"Bearer {token}"}, **what
                    )
                    assert answer.status_code in (401, 403, 405), (
                        scope,
                        method,
                        place,
                        answer.text,
                    )
                answer = ann.request(method, place, **what)
                about = (method, place, answer.status_code, answer.text)
                if {"name", "id"} & {*names}:
                    assert answer.status_code == (
                        401 if place.endswith("/events") and method == "post" else 403
                    ), about
                elif answer.status_code < 400:
                    served.add((method, path))
        assert served <= {
            *(
                ("get", path)
                for path in (
                    "/healthz",
                    "/livez",
                    "/readyz",
                    "/v1/topologies",
                    "/v1/operations",
                    "/api/v1/topology/summary",
                )
            ),
            ("post", "/v1/uploads"),
        }
        mine = {"name": "billing", "handle": secured.upload(ann)}
        assert ann.post("/v1/submit", json=mine).status_code == 409
        after = state_of(world)
        changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
        assert {path for path in changed if "/upload." not in path} == set()
        assert secured.admin.get(f"/v1/topologies/{billing}").json()["status"] == "ACTIVE"


def test_an_upload_is_of_whoever_began_it(
    secured: Secured,
    stage: Stage,
    certificate: Callable[..., dict[str, str]],
) -> None:
    with secured.user("ann") as ann, secured.user("eve") as eve:
        handle, whole = ann.post("/v1/uploads").json()["handle"], secured.upload(ann)
        asked = [
            *(("PUT", f"/v1/uploads/{handle}/{part}") for part in PARTS),
            *(("GET", f"/v1/uploads/{whole}/{part}") for part in PARTS),
            *(
                (method, f"/v1/uploads/{one}{more}")
                for one in (handle, whole)
                for method, more in (("POST", "/finish"), ("DELETE", ""))
            ),
        ]
        for method, path in asked:
            refused = eve.request(method, path, content=b"evil" if method == "PUT" else None)
            assert refused.status_code == 404 and "no upload" in refused.text, (
                method,
                path,
                refused.text,
            )
        assert (
            stolen := eve.post("/v1/submit", json={"name": "mine", "handle": whole})
        ).status_code == 404, stolen.text
        assert ann.put(f"/v1/uploads/{handle}/conf", content=b"{}").status_code == 201
        assert ann.post(f"/v1/uploads/{whole}/finish").status_code == 200
        assert secured.admin.get(f"/v1/uploads/{whole}/archive").content == ARCHIVE
        theirs = secured.upload(secured.admin)
        assert ann.post(f"/v1/uploads/{theirs}/finish").status_code == 404
    # A leader that began none of them knows it, too.
    secured.nimbus.stop()
    secured.nimbus = stage.nimbus(
        conf={key: secured.nimbus.conf[key] for key in KEYS}
    ).await_leading()
    with secured.user("ann") as ann, secured.user("eve") as eve:
        for method, path in asked:
            refused = eve.request(method, path, content=b"evil" if method == "PUT" else None)
            assert refused.status_code == 404, (method, path, refused.text)
        assert ann.get(f"/v1/uploads/{handle}/conf").content == b"{}"
        assert ann.put(f"/v1/uploads/{handle}/archive", content=ARCHIVE).status_code == 201
        assert ann.delete(f"/v1/uploads/{handle}").status_code == 204


def test_open_uploads_of_one_user_keep_nobody_out(secured: Secured) -> None:
    with secured.user("ann") as ann, secured.user("eve") as eve:
        handles: list[str] = []
        while (begun := ann.post("/v1/uploads")).status_code == 201:
            handles.append(begun.json()["handle"])
        assert (
            begun.status_code == 503 and "'ann' has" in begun.text and len(handles) == MAX_PER_USER
        )
        assert (
            eve.post("/v1/uploads").status_code
            == secured.admin.post("/v1/uploads").status_code
            == 201
        )
        assert ann.delete(f"/v1/uploads/{handles[0]}").status_code == 204
        assert ann.post("/v1/uploads").status_code == 201


def test_a_submission_is_cancelled_by_its_user_and_by_no_other(secured: Secured) -> None:
    with secured.world() as world, secured.user("ann") as ann, secured.user("eve") as eve:
        ctx = world.context()
        epoch = ctx.current_epoch()
        allocate_topology_id(ctx, "t1", "billing", epoch, user="ann")
        path = "/v1/topologies/billing/kill"
        answer = eve.post(path, json={})
        assert answer.status_code == 403 and "an administrator can add the user" in answer.text
        allocate_topology_id(ctx, "t2", "billing", epoch, user="eve")

        def is_refused() -> bool:
            return ann.post(path, json={"dry_run": True}).status_code == 403

        eventually(is_refused, 10, "the second submission, which is not hers")
        assert secured.admin.post(path, json={}).json()["status"] == "CANCELLED"
        allocate_topology_id(ctx, "t3", "billing", epoch, user="ann")
        kill = eventually(
            lambda: ann.post(path, json={}).json().get("status") == "CANCELLED", 10, "her own"
        )
        assert kill
        stored = read_client_token(ctx, "t3")
        assert stored is not None and stored[0].cancelled_by == "kill"


LEDGER = ["finance", "ledger"]
ASSETS = "topology.component.assets"


def submit_as(world: World, user: str, assets: list[str]) -> str:
    """A topology ``wc`` of a limited user, whose bolt ``count`` declares the assets; its id."""
    count = {**WORD_COUNT["bolts"]["count"], "conf": {ASSETS: assets}}
    topology = {**WORD_COUNT, "bolts": {**WORD_COUNT["bolts"], "count": count}}
    handle = world.upload("handle-assets", topology)
    world.blobs.put(upload_key(handle, "submitter"), user.encode())
    submit(world.context(), name="wc", token="token-assets", handle=handle)
    topology_id = world.named("wc").id
    world.run_workers(topology_id)
    return topology_id


def report(
    secured: Secured, world: World, topology_id: str, *events: DagsterEvent
) -> dict[str, Any]:
    """Report the events as the code of the topology can: with the start token of its worker."""
    worker = next(iter(world.cluster.live_workers(topology_id).values()))
    reporter = {"component": "count", "task": 4}
    documents = [{**msgspec.to_builtins(event), **reporter} for event in events]
    answer = secured.nimbus.client(Security.of(secured.certificate("worker"))).post(
        f"/v1/topologies/{topology_id}/events",
        json={"events": documents},
        headers={"Authorization": f"Bearer {worker.token}"},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def event(kind: str, key: list[str]) -> DagsterEvent:
    check = {"check": "balanced", "passed": True} if kind == "check" else {}
    return DagsterEvent.make("wc/count", kind, key, **check)


def test_a_worker_reports_on_no_asset_of_another_team(secured: Secured) -> None:
    own = ["topologies", "wc", "words"]
    with secured.world() as world:
        world.supervisor("s1")
        topology_id = submit_as(world, "ann", ["topologies/wc/words", "lake/clicks"])
        kinds = ("materialization", "observation", "check")
        keys = (LEDGER, ["topologies", "wc2", "words"], ["topologies/wc/words"], [*own, "x"])
        forged = [event(kind, key) for kind in kinds for key in keys]
        declared_only = event("check", ["lake", "clicks"])
        other_table = event("materialization", list(target_key("split", "topologies/wc/words")))
        genuine = [event(kind, own) for kind in kinds]
        genuine.append(event("materialization", list(target_key("count", "topologies/wc/words"))))
        answer = report(secured, world, topology_id, *forged, declared_only, other_table, *genuine)
        refused: dict[str, str] = answer["refused"]
        assert refused.keys() == {entry.id for entry in (*forged, declared_only, other_table)}
        assert answer["stored"] == [entry.id for entry in genuine]
        assert (answer["undefined"], answer["problem"]) == ({}, None)
        assert "component 'count' does not declare it" in refused[forged[0].id]
        assert ASSETS in refused[forged[0].id]
        assert "nimbus.user.asset.prefixes: topologies/wc/" in refused[declared_only.id]
        log = world.cluster.event_log("wc")
        assert log is not None and log.waiting == len(genuine), "nothing else is stored"
