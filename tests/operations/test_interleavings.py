"""Two actors operate on one cluster, step by step in any order; they crash, leaders change, hosts
go.

A state machine of hypothesis on real ZooKeeper. After every step the invariants I1 to I8 hold; a
deposed actor's writes never land; and whatever happened, in the end the leader alone brings
everything to rest. `make fuzz` makes it a long, random search; in `make test` it is the same few
examples every time.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.invariants.rules import RULES, violations
from storm_dagster.core.invariants.snapshot import ClusterSnapshot
from storm_dagster.core.liveness.causes import Cause
from storm_dagster.model import paths
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.operations.live import healing, lifecycle
from storm_dagster.operations.live.cleaner import clean
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.read.inspection import take_snapshot
from storm_dagster.operations.results import LifecycleResult
from storm_dagster.operations.submit.staging import read_record
from storm_dagster.testing.waiting import patience
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.acting import finish_due, submit, upgrade
from storm_rigs.operations.archives import pack_archive
from storm_rigs.operations.upgrades import UpgradeStandIns
from storm_rigs.stage.conf import zookeeper_conf
from storm_rigs.stage.records import Crash, World

pytestmark = [pytest.mark.zookeeper, pytest.mark.fuzz, pytest.mark.timeout(3600)]

STEPS = 50
HEALS = {each.name for each in RULES if each.heals}
NAMES = ("a", "b")
TOKENS = ("t1", "t2", "t3")
RACING = (
    *("submit", "submit", "kill", "rebalance", "update", "restart", "finish"),
    *("update", "restart", "deactivate", "activate"),
    *("complete_upgrade", "roll_back", "go on"),
)
COMMITS = {
    f"before.{name}"
    for name in (
        "publish",
        "activate",
        "deactivate",
        "kill",
        "unassign",
        "rebalance",
        "finish_rebalance",
        "reassign",
        "gray_upgrade",
        "continue_upgrade",
        "complete_upgrade",
        "roll_back",
        "finish_rollback",
    )
}


class Player:
    """One process: it runs an operation in a thread of its own, which stands still before and after
    each step.
    """

    def __init__(
        self, run: Callable[[Any], object], context: Callable[..., Any], epoch: int | None
    ) -> None:
        self.epoch = epoch
        self.error: BaseException | None = None
        self._said: queue.Queue[str | None] = queue.Queue()
        self._go = threading.Semaphore(0)
        self._crash = False
        self._thread = threading.Thread(
            target=self._run,
            args=(run, context(checkpoint=self._observe, epoch=epoch)),
            daemon=True,
        )
        self._thread.start()
        self.point = self._said.get(timeout=60)

    @property
    def ended(self) -> bool:
        return self.point is None

    def _observe(self, point: str) -> None:
        self._said.put(point)
        self._go.acquire()
        if self._crash:
            raise Crash(point)

    def _run(self, run: Callable[[Any], object], ctx: Any) -> None:
        try:
            run(ctx)
        except (StormDagsterError, Crash) as error:
            self.error = error
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._said.put(None)

    def advance(self) -> None:
        self._go.release()
        self.point = self._said.get(timeout=60)

    def crash(self) -> None:
        self._crash = True
        while not self.ended:
            self.advance()


class Cluster(RuleBasedStateMachine):
    """What may happen to a cluster."""

    def __init__(self, make: Callable[[], World]) -> None:
        super().__init__()
        self.world = make()
        self.world.supervisor("s3")
        self.players: list[Player | None] = [None, None]
        self.former: ClusterSnapshot | None = None
        self.ids: dict[str, str] = {}
        self.handles = 0
        self.stand_ins: dict[str, UpgradeStandIns] = {}
        # Topology id -> what its newest acknowledged command made of it, and the names about which
        # one is under way.
        self.acknowledged: dict[str, str] = {}
        self.under_way: list[str] = []
        self.origins: dict[str, str] = {}

    def epoch(self) -> int:
        return self.world.context().current_epoch()

    # -- what actors begin -------------------------------------------------------------------------
    def begin(self, actor: int, pinned: bool, run: Callable[[Any], object]) -> None:
        if self.players[actor] is not None:
            return
        player = Player(run, self.world.context, self.epoch() if pinned else None)
        self.players[actor] = None if player.ended else player
        self.expect_typed(player)

    def expect_typed(self, player: Player) -> None:
        assert player.error is None or isinstance(player.error, StormDagsterError | Crash), (
            player.error
        )

    def upload(self, workers: int, archive: bytes | None = None) -> str:
        self.handles += 1
        # A topology that is upgraded worker by worker has its topology master in a worker of its
        # own.
        conf = {"topology.workers": workers, "topology.master.single.worker": workers > 1}
        return self.world.upload(
            f"h{self.handles}", conf=conf, **({} if archive is None else {"archive": archive})
        )

    actors = st.integers(0, 1)
    names = st.sampled_from(NAMES)

    @rule(
        actor=actors,
        pinned=st.booleans(),
        name=names,
        token=st.sampled_from(TOKENS),
        workers=st.integers(1, 3),
    )
    def submit(self, actor: int, pinned: bool, name: str, token: str, workers: int) -> None:
        handle = self.upload(workers)
        self.begin(actor, pinned, lambda ctx: submit(ctx, name=name, token=token, handle=handle))

    @rule(actor=actors, pinned=st.booleans(), name=names, delay=st.sampled_from([0, 0, 30]))
    def kill(self, actor: int, pinned: bool, name: str, delay: int) -> None:
        self.begin(
            actor, pinned, lambda ctx: self.command(name, lambda: lifecycle.kill(ctx, name, delay))
        )

    @rule(
        actor=actors,
        pinned=st.booleans(),
        name=names,
        verb=st.sampled_from(["activate", "deactivate"]),
    )
    def turn(self, actor: int, pinned: bool, name: str, verb: str) -> None:
        self.begin(
            actor,
            pinned,
            lambda ctx: self.command(name, lambda: getattr(lifecycle, verb)(ctx, name)),
        )

    def command(self, name: str, run: Callable[[], LifecycleResult]) -> None:
        """Run it; from when it is acknowledged until another is sent, what it said stays true."""
        for topology_id in [each for each, said in self.acknowledged.items() if said != "gone"]:
            if topology_id.rpartition("-")[0].rpartition("-")[0] == name:
                del self.acknowledged[topology_id]
        self.under_way.append(name)
        try:
            report = run()
        except Crash:
            # Its write may have landed: nothing is known until the next one.
            self.under_way.remove(name)
            raise
        except StormDagsterError:
            self.under_way.remove(name)
            return
        self.under_way.remove(name)
        if report.status in (None, "KILLED"):
            self.acknowledged[report.topology_id] = "gone"
        elif name not in self.under_way:
            self.acknowledged[report.topology_id] = report.status

    @rule(
        actor=actors,
        pinned=st.booleans(),
        name=names,
        workers=st.integers(1, 4),
        split=st.integers(1, 3),
        again=st.booleans(),
        delay=st.sampled_from([0, 0, 30]),
    )
    def rebalance(
        self, actor: int, pinned: bool, name: str, workers: int, split: int, again: bool, delay: int
    ) -> None:
        def run(ctx: Any) -> None:
            rebalance(
                ctx,
                name,
                workers,
                {"split": split},
                reassign=again,
                wait_secs=delay,
                waits_for_delay=False,
            )

        self.begin(actor, pinned, run)

    @rule(
        actor=actors,
        pinned=st.booleans(),
        name=names,
        token=st.sampled_from(TOKENS),
        workers=st.integers(1, 3),
    )
    def update(self, actor: int, pinned: bool, name: str, token: str, workers: int) -> None:
        handle = self.upload(workers)
        self.begin(
            actor,
            pinned,
            lambda ctx: lifecycle.update(ctx, name, token=f"u-{token}", handle=handle),
        )

    @rule(actor=actors, pinned=st.booleans(), name=names)
    def restart(self, actor: int, pinned: bool, name: str) -> None:
        self.begin(actor, pinned, lambda ctx: lifecycle.restart(ctx, name))

    @rule(
        actor=actors,
        pinned=st.booleans(),
        name=names,
        number=st.integers(1, 3),
        workers=st.integers(2, 3),
    )
    def gray_upgrade(self, actor: int, pinned: bool, name: str, number: int, workers: int) -> None:
        handle = self.upload(workers, pack_archive(f"archive {self.handles}"))
        token = f"g-{self.handles}"
        self.begin(
            actor,
            pinned,
            lambda ctx: upgrade(ctx, name=name, number=number, handle=handle, token=token),
        )

    @rule(
        actor=actors,
        pinned=st.booleans(),
        name=names,
        verb=st.sampled_from(["go on", "complete_upgrade", "roll_back"]),
    )
    def drive_upgrade(self, actor: int, pinned: bool, name: str, verb: str) -> None:
        def run(ctx: Any) -> None:
            if verb == "go on":
                upgrade(ctx, name=name, number=1, handle=None, token="")
            else:
                getattr(lifecycle, verb)(ctx, name)

        self.begin(actor, pinned, run)

    @precondition(lambda self: not any(self.players))
    @rule(name=names, number=st.integers(1, 3), picked=st.booleans())
    def an_upgrade_is_under_way(self, name: str, number: int, picked: bool) -> None:
        """Begun from end to end, so that what follows meets it often."""
        ctx = self.world.context()
        with contextlib.suppress(StormDagsterError):
            if self.world.cluster.load_view().topology_named(name) is None:
                self.handles += 1
                submit(ctx, name=name, token=f"s-{self.handles}", handle=self.upload(3))
            handle = self.upload(3, pack_archive(f"archive {self.handles}"))
            upgrade(ctx, name=name, number=number, handle=handle, token=f"g-{self.handles}")
        if picked:
            self.topology_master_and_supervisors(name)

    @rule(name=names)
    def topology_master_and_supervisors(self, name: str) -> None:
        """They pick the workers of a batch and bring processes in line, between any two steps of
        the others.
        """
        topology = self.world.cluster.load_view().topology_named(name)
        if topology is None or topology.assignment is None:
            return
        # What they find changed under their hands they leave to their next turn.
        with contextlib.suppress(StormDagsterError):
            stand_ins = self.stand_ins.get(topology.id)
            if stand_ins is None:
                stand_ins = self.stand_ins[topology.id] = UpgradeStandIns(
                    self.world.cluster, topology.id
                )
            stand_ins.batch()

    @rule(actor=actors, pinned=st.booleans())
    def reassign(self, actor: int, pinned: bool) -> None:
        causes = self.causes()
        if causes:
            self.begin(actor, pinned, lambda ctx: healing.reassign(ctx, causes))

    @rule(actor=actors, pinned=st.booleans())
    def finish_due(self, actor: int, pinned: bool) -> None:
        self.begin(actor, pinned, finish_due)

    @rule(actor=actors, pinned=st.booleans())
    def clean(self, actor: int, pinned: bool) -> None:
        # With tokens in their time: a submission in flight is never touched.
        self.begin(actor, pinned, lambda ctx: clean(ctx, grace_secs=0))

    def causes(self) -> list[Cause]:
        view = self.world.cluster.load_view()
        return [
            Cause(
                topology.id,
                topology.base.name,
                topology.assignment_at.version,
                "lost_host",
                worker.node,
                worker.host,
                worker.port,
                worker.ids,
            )
            for topology in view.topologies.values()
            if topology.assignment is not None and topology.assignment_at is not None
            for worker in topology.assignment.workers
            if worker.node not in view.supervisors
        ]

    # -- how they go on ----------------------------------------------------------------------------
    @precondition(lambda self: any(self.players))
    @rule(actor=actors, until=st.sampled_from(["commit", "commit", "end", "step"]))
    def advance(self, actor: int, until: str) -> None:
        player = self.players[actor] or self.players[1 - actor]
        assert player is not None
        deposed = player.epoch is not None and player.epoch != self.epoch()
        before = self.everything() if deposed else None
        player.advance()
        # Where races are lost and won: all is read and decided, and nothing is written yet.
        while (
            not player.ended and until != "step" and (until == "end" or player.point not in COMMITS)
        ):
            player.advance()
        if deposed:
            assert self.everything() == before, "a deposed actor's write landed"
        if player.ended:
            self.players[self.players.index(player)] = None
        self.expect_typed(player)

    @precondition(lambda self: not any(self.players))
    @rule(
        pinned=st.booleans(),
        names=st.tuples(names, names),
        verbs=st.tuples(*[st.sampled_from(RACING)] * 2),
        first=actors,
        tokens=st.permutations(TOKENS),
        workers=st.integers(1, 3),
    )
    def race(
        self,
        pinned: bool,
        names: tuple[str, str],
        verbs: tuple[str, str],
        first: int,
        tokens: list[str],
        workers: int,
    ) -> None:
        """Both decide on the same view before either writes; then one after the other writes."""
        for actor in (0, 1):
            name = names[actor]
            match verbs[actor]:
                case "submit":
                    self.submit(actor, pinned, name, tokens[actor], workers)
                case "kill":
                    self.kill(actor, pinned, name, 30 * (workers > 1))
                case "activate" | "deactivate":
                    self.turn(actor, pinned, name, verbs[actor])
                case "rebalance":
                    self.rebalance(actor, pinned, name, workers + 1, 2, False, 0)
                case "update":
                    self.update(actor, pinned, name, tokens[actor], workers)
                case "restart":
                    self.restart(actor, pinned, name)
                case "complete_upgrade" | "roll_back" | "go on":
                    self.drive_upgrade(actor, pinned, name, verbs[actor])
                case _:
                    self.finish_due(actor, pinned)
            if self.players[actor] is not None:
                self.advance(actor, "commit")
        for actor in (first, 1 - first):
            if self.players[actor] is not None:
                self.advance(actor, "end")

    @precondition(lambda self: any(self.players))
    @rule(actor=actors)
    def crash(self, actor: int) -> None:
        player = self.players[actor] or self.players[1 - actor]
        assert player is not None
        player.crash()
        self.players[self.players.index(player)] = None

    @rule()
    def another_leader(self) -> None:
        self.world.lead()

    @rule(supervisor=st.sampled_from(["s1", "s2", "s3"]))
    def a_host_goes_or_comes(self, supervisor: str) -> None:
        path = paths.supervisor(supervisor)
        if self.world.cluster.state.exists(path):
            if len(self.world.cluster.state.get_children(paths.SUPERVISORS)) > 1:
                self.world.cluster.state.delete_node(path)
        else:
            self.world.supervisor(supervisor)

    def everything(self) -> dict[str, Any]:
        """Every node that operations write, with its data and version; supervisors come and go by
        themselves.
        """
        state, found, folders = self.world.cluster.state, {}, [""]
        while folders:
            listed = state.find_children_many([folder or "/" for folder in folders])
            named = [
                f"{folder}/{child}"
                for folder, children in zip(folders, listed, strict=True)
                for child in children or ()
                if f"{folder}/{child}" != paths.SUPERVISORS
            ]
            found.update(zip(named, state.get_many(named), strict=True))
            folders = named
        return found

    # -- what holds --------------------------------------------------------------------------------
    @invariant()
    def invariants_hold(self) -> None:
        snapshot = take_snapshot(self.world.context(), self.former)
        self.former = snapshot
        found = [each.sentence for each in violations(snapshot) if each.rule not in HEALS]
        assert found == []
        for token, record in (snapshot.tokens or {}).items():
            assert self.ids.setdefault(token, record.topology_id) == record.topology_id
        self.what_was_acknowledged_stays(snapshot)

    def what_was_acknowledged_stays(self, snapshot: ClusterSnapshot) -> None:
        """What was killed goes and has no successor; a successor is as active as what it took the
        place of should be.
        """
        for topology in snapshot.view.topologies.values():
            replaced = self.replaced_by(topology.id, topology.base.token)
            assert self.acknowledged.get(replaced) != "gone", (
                f"{topology.id} came in the place of what was killed"
            )
            if replaced in self.acknowledged:
                self.acknowledged[topology.id] = self.acknowledged.pop(replaced)
            said = self.acknowledged.get(topology.id)
            if said == "gone":
                assert topology.base.status == "KILLED"
            elif said is not None and topology.base.status != "KILLED":
                assert topology.base.wanted_status == said, f"{topology.id} was made {said}"

    def replaced_by(self, topology_id: str, token: str) -> str:
        if topology_id not in self.origins:
            with contextlib.suppress(StormDagsterError):
                self.origins[topology_id] = read_record(self.world.context(), token).replaces or ""
        return self.origins.get(topology_id, "")

    def teardown(self) -> None:
        try:
            for player in self.players:
                if player is not None:
                    player.crash()
            self.come_to_rest()
        finally:
            self.world.cluster.disconnect()

    def come_to_rest(self) -> None:
        """Nobody acts any more: a new leader finishes what is due, heals, and cleans."""
        self.world.lead()
        for supervisor in ("s1", "s2", "s3"):
            self.world.supervisor(supervisor)
        ctx = self.world.context()
        finish_due(ctx)
        healing.reassign(ctx, self.causes())
        for topology in ctx.cluster.load_view().topologies.values():
            # An upgrade that is under way stays so until its time is over: a person takes it back.
            if topology.base.status == "UPGRADING":
                lifecycle.roll_back(ctx, topology.base.name)
            self.topology_master_and_supervisors(topology.base.name)
        finish_due(ctx)
        clean(ctx, grace_secs=0, token_secs=0, upload_secs=0)
        report, _ = clean(ctx, grace_secs=0, token_secs=0, upload_secs=0)
        assert (report.nodes, report.blobs, report.tokens, report.problems) == ((), (), (), ())
        snapshot = take_snapshot(ctx)
        assert [each.sentence for each in violations(snapshot)] == []
        for topology in snapshot.view.topologies.values():
            assert topology.base.status == topology.base.wanted_status


def test_any_interleaving_keeps_the_invariants(zookeeper_server: str, tmp_path: Path) -> None:
    def make() -> World:
        conf = {
            **zookeeper_conf(zookeeper_server),
            "storm.zookeeper.session.timeout": patience(20000),
        }
        blobs = LocalBlobStore(Path(tempfile.mkdtemp(dir=tmp_path)))
        cluster = StormClusterState.open(conf, create_root=True)
        made = World(cluster, blobs, {**conf, "task.cleanup.timeout.sec": 0})
        made.settings["sleep"] = lambda seconds: None
        made.lead()
        made.supervisor("s1")
        made.supervisor("s2")
        return made

    class OneCluster(Cluster):
        def __init__(self) -> None:
            super().__init__(make)

    run_state_machine_as_test(
        OneCluster,
        settings=settings(
            max_examples=max(settings().max_examples // 8, 1),
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),  # type: ignore[arg-type]
        ),
    )
