"""The checks of a cluster in which nothing fails any more, and of one in which some machines are
gone for good.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from storm_dagster.core.invariants.rules import ClusterSnapshot, violations
from storm_dagster.model import paths
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import code_key, conf_key, jar_key
from storm_dagster.model.records import Assignment, StormBase
from storm_dagster.operations.live.blacklist import change_blacklist
from storm_simulation.drains import check_calm_drains
from storm_simulation.healing_checks import (
    HEAL_SECS,
    SESSION_SECS,
    await_end_of_pause,
    check_late_runs,
    check_pause,
    check_runs,
    check_sensor,
    choose_healer,
    secs_until_healed,
)
from storm_simulation.healing_faults import switch_healer
from storm_simulation.rules import ROOT, stored

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster
    from storm_simulation.commands import Command
    from storm_simulation.faults import Faults

_SETTLE_SECS = 300.0
_FLAPS = 10
"""How often hosts come and go in the end, in about two and a half minutes."""
_KEPT = (f"{ROOT}{paths.TOKENS}", f"{ROOT}{paths.ASSIGNMENTS_BAK}", f"{ROOT}{paths.SENSORS}")
"""What outlives topologies."""
_CHANGES = {"submit", "kill", "activate", "deactivate"}


class Calm:
    """The end of a program."""

    def __init__(self, cluster: Cluster, faults: Faults) -> None:
        self.cluster = cluster
        self.faults = faults

    def check(self) -> None:
        """All of it; raises by way of the cluster's violations."""
        cluster = self.cluster
        self.faults.mend_all()
        cluster.kernel.preemption = 0.0
        cluster.start_missing()
        self._settle()
        self._acknowledged()
        self._serves()
        self._view()
        check_calm_drains(self)
        self.await_healed(HEAL_SECS, "after hosts were drained")
        self._losses()
        check_pause(self)
        check_late_runs(self)
        self._flapping()
        self._idle()
        self._leaks()

    # -- everything comes back ---------------------------------------------------------------------

    def bases(self) -> dict[str, StormBase]:
        return self.cluster.rules.bases

    def _dead(self) -> list[str]:
        """Tasks that should run and do not, in words."""
        found: list[str] = []
        for topology_id, base in self.bases().items():
            assignment: Assignment | None = self.cluster.rules.assignments.get(topology_id)
            if base.status in ("KILLED", "REBALANCING"):
                found.append(f"{topology_id} is {base.status}")
            elif assignment is None:
                found.append(f"{topology_id} has no assignment")
            else:
                tasks = [task for worker in assignment.workers for task in worker.ids]
                dead = [
                    task for task in tasks if not self.cluster.owners.running(topology_id, task)
                ]
                if dead:
                    found.append(f"tasks {dead} of {topology_id}")
                if base.status != base.wanted_status:
                    found.append(f"{topology_id} is {base.status}, not {base.wanted_status}")
        return found

    def _settle(self) -> None:
        cluster = self.cluster
        ended = cluster.until(
            lambda: all(c.ended is not None or _gone(c) for c in cluster.commands),
            _SETTLE_SECS + 60,
        )
        if not ended:
            left = [str(c) for c in cluster.commands if c.ended is None and not _gone(c)]
            self.fail("I8", f"a command does not end: {left[0]}")
        if not self.await_leader():
            self.fail("liveness", "nobody leads 30 s after the last fault")
        await_end_of_pause(self)
        self._end_upgrades()
        self.await_healed(_SETTLE_SECS, "after the last fault")
        for code_dir in sorted(self.cluster.rules.rolled_back):
            for worker in self.cluster.rules.running(code_dir):
                self.fail("I7", f"{worker.process.name} runs {code_dir}, which was rolled back")

    def await_leader(self) -> bool:
        """Whether a nimbus leads within 30 s."""
        return self.cluster.until(lambda: self.cluster.leader() is not None, 30.0)

    def _end_upgrades(self) -> None:
        """As an operator does: an upgrade whose batch is done waits for one."""
        for _ in range(10):
            names = sorted(
                base.name for base in self.bases().values() if base.status == "UPGRADING"
            )
            for name in names:
                verb = self.cluster.kernel.rng.choice(("complete_upgrade", "roll_back"))
                if verb == "roll_back":
                    self._slow_down(name)
                command = self.cluster.command(verb, name)
                self.cluster.until(lambda command=command: command.ended is not None, 60.0)
            if not names:
                break

    def _slow_down(self, name: str) -> None:
        """For a while no supervisor takes a worker of that topology back: a rollback waits for
        that.
        """
        for worker in list(self.cluster.workers.values()):
            process = self.cluster.supervisors[worker.host.name].process
            if (
                worker.spec.topology_id.rsplit("-", 2)[0] == name
                and process is not None
                and process.runs
            ):
                process.freeze()
                self.cluster.kernel.after(2.0, process.thaw)

    def await_healed(self, secs: float, when: str) -> None:
        if not self.cluster.until(lambda: not self._dead(), secs):
            self.fail("liveness", f"{secs:.0f} s {when}: {'; '.join(self._dead()[:3])}")

    def fail(self, invariant: str, text: str) -> None:
        self.cluster.violated(invariant, text)
        self.cluster.run(0.001)

    # -- what was acknowledged ---------------------------------------------------------------------

    def _acknowledged(self) -> None:
        by_name = {base.name: base for base in self.bases().values()}
        for name in sorted({command.name for command in self.cluster.commands}):
            mine = [command for command in self.cluster.commands if command.name == name]
            for at, command in enumerate(mine):
                if not command.acknowledged or command.verb not in _CHANGES:
                    continue
                assert command.ended is not None
                others = [
                    other
                    for other in mine[:at] + mine[at + 1 :]
                    if other.verb in _CHANGES
                    and (other.ended is None or other.ended >= command.begun)
                ]
                if others or name in self.cluster.rules.tainted:
                    continue
                replacing = any(
                    other.verb in ("update", "restart") and _overlap(command, other)
                    for other in mine
                )
                during = " (during an update or restart)" if replacing else ""
                base = by_name.get(name)
                wanted = {"activate": "ACTIVE", "deactivate": "INACTIVE"}.get(command.verb)
                if command.verb == "kill" and base is not None:
                    self.fail("acknowledged", f"{command}, and {name} is {base.status}")
                elif command.verb == "submit" and base is None:
                    self.fail("acknowledged", f"{command}, and nothing is called {name}")
                elif wanted and base is not None and base.wanted_status != wanted:
                    self.fail(
                        "acknowledged", f"{command}{during}, and {name} is {base.wanted_status}"
                    )

    def _serves(self) -> None:
        """Clients reach the leader, and what they put is stored."""
        from storm_simulation.dagster_side import operations

        errors: list[str] = []

        def put() -> None:
            for _ in range(10):
                try:
                    with operations(self.cluster) as ctx:
                        ctx.blobs.put("probe", b"")
                        return
                except StormDagsterError as error:
                    errors.append(error.message)
                    self.cluster.kernel.sleep(3.0)

        process = self.cluster.job("probe", put)
        if not self.cluster.until(lambda: process.dead, 90.0) or len(errors) == 10:
            self.fail("liveness", f"nothing can be stored after the last fault: {errors[-1:]}")

    def _view(self) -> None:
        """The product's own invariants, on what a client reads now."""
        found: list[str] = []
        from storm_simulation.dagster_side import operations

        def look() -> None:
            with operations(self.cluster) as ctx:
                broken = violations(ClusterSnapshot(ctx.cluster.load_view()))
                # A supervisor may be between two sessions.
                found.extend(
                    each.sentence for each in broken if each.rule != "assigned_to_live_slots"
                )

        process = self.cluster.job("look", look)
        self.cluster.until(lambda: process.dead, 30.0)
        if found:
            self.fail("core", found[0])

    # -- some are gone for good --------------------------------------------------------------------

    def _losses(self) -> None:
        """With a nimbus, a quorum and a free slot every dead task runs again."""
        cluster = self.cluster
        rng = cluster.kernel.rng
        # Down to one: fewer than the minimum for a submission place what is dead all the same.
        gone = rng.sample(sorted(cluster.nimbuses), rng.randrange(len(cluster.nimbuses)))
        if not self._readable_without(gone):
            gone = []
        most = self.spare_hosts()
        healer = choose_healer(cluster)
        is_lost = healer == "sensor" and rng.random() < 0.2
        alone = is_lost or healer != "sensor"
        gone += rng.sample(sorted(cluster.supervisors), rng.randint(min(int(alone), most), most))
        if is_lost:
            gone.append(cluster.dagster.host.name)
        secs = secs_until_healed(cluster, gone, is_alone=alone)
        lost_workers = [
            worker.slot
            for assignment in cluster.rules.assignments.values()
            for worker in assignment.workers
            if worker.node in gone
        ]
        for name in gone:
            cluster.lose_host(cluster.hosts[name])
        self.faults.counts["machine lost for good"] += len(gone)
        self.faults.log.append(f"{cluster.kernel.now:.2f} lost for good: {gone}, {healer}")
        self.await_healed(secs, f"after {gone} were lost for good ({healer})")
        if lost_workers and not alone:
            check_sensor(self)
        for name in gone:
            cluster.boot_host(cluster.hosts[name])
        switch_healer(cluster, "sensor")

    def spare_hosts(self) -> int:
        """Hosts that may be lost, at most two, while the others have slots for everything."""
        if any(base.isolation for base in self.bases().values()):
            # What is isolated on a host may fill it.
            return 0
        cluster = self.cluster
        used = sum(len(a.workers) for a in cluster.rules.assignments.values())
        ports = len(next(iter(cluster.supervisors.values())).ports)
        needed = -(-(used + 1) // ports)
        hosts = len(cluster.supervisors)
        return max(0, min(2, hosts - 1, hosts - needed))

    def _readable_without(self, gone: list[str]) -> bool:
        """Whether the nimbuses that stay hold the code of everything that runs."""
        held = {
            key
            for name, part in self.cluster.nimbuses.items()
            if name not in gone
            for key in stored(part.host)
        }
        dirs = [assignment.code_dir for assignment in self.cluster.rules.assignments.values()]
        return all(
            key in held
            for code_dir in dirs
            for key in (code_key(code_dir), conf_key(code_dir), jar_key(code_dir))
        )

    # -- hosts come and go -------------------------------------------------------------------------

    def _flapping(self) -> None:
        """While no host is open to new work, hosts come and go: few runs change nothing."""
        cluster = self.cluster
        rng = cluster.kernel.rng
        flapping = [cluster.hosts[name] for name in rng.sample(sorted(cluster.supervisors), 2)]
        if not self._change_blacklist(add=sorted(cluster.supervisors)):
            return
        self.await_healed(HEAL_SECS + 60.0, "after the last machine was back")
        begin = cluster.kernel.now
        for number in range(_FLAPS):
            host = flapping[number % 2]
            cluster.lose_host(host)
            cluster.run(rng.uniform(SESSION_SECS + 2.0, SESSION_SECS + 8.0))
            cluster.boot_host(host)
            cluster.run(rng.uniform(2.0, 8.0))
        self.faults.counts["host flaps"] += _FLAPS
        check_runs(self, begin)
        self._change_blacklist(remove=sorted(cluster.supervisors))
        # The sensor may leave a topology to the leader now, whose backstop heals it in time.
        self.await_healed(HEAL_SECS, "after hosts came and went")

    def _change_blacklist(self, add: Collection[str] = (), remove: Collection[str] = ()) -> bool:
        """Whether the blacklist is as it should be within a minute."""
        from storm_simulation.dagster_side import operations

        done: list[bool] = []

        def change() -> None:
            for _ in range(10):
                try:
                    with operations(self.cluster) as ctx:
                        change_blacklist(ctx, add=add, remove=remove)
                    done.append(True)
                    return
                except StormDagsterError:
                    self.cluster.kernel.sleep(3.0)

        process = self.cluster.job("blacklist", change)
        self.cluster.until(lambda: process.dead, 60.0)
        return bool(done)

    # -- nothing happens any more ------------------------------------------------------------------

    def _idle(self) -> None:
        """I8: who has nothing to do writes nothing besides heartbeats, once the cleaner has done
        its work.
        """
        busy = ""
        for _ in range(6):
            busy = self._busy_within(30.0)
            if not busy:
                return
        self.fail("I8", f"{busy} in an idle cluster")

    def _busy_within(self, secs: float) -> str:
        cluster = self.cluster
        before = {label: list(counts) for label, counts in cluster.ensemble.counts.items()}
        cluster.run(secs)
        for label, (reads, writes) in sorted(cluster.ensemble.counts.items()):
            old = before.get(label, [0, 0])
            if (writes - old[1]) / secs > 0.4:
                return f"{label} writes {(writes - old[1]) / secs:.1f}/s"
            if (reads - old[0]) / secs > 60.0:
                return f"{label} reads {(reads - old[0]) / secs:.1f}/s"
        return ""

    def _leaks(self) -> None:
        """I3: when all topologies are gone nothing of them is left."""
        cluster = self.cluster
        names = sorted({base.name for base in self.bases().values()})
        for name in names:
            command = cluster.command("kill", name, wait=0)
            cluster.until(lambda command=command: command.ended is not None, 120.0)
        if not cluster.until(lambda: not self.bases(), 120.0):
            self.fail("I3", f"not removed: {sorted(self.bases())}")
        cluster.until(lambda: not self._left(), 240.0)
        left = self._left()
        if left:
            self.fail("I3", f"left of topologies that are gone: {left[0]} ({len(left)} in all)")
        for each in self._watched():
            self.fail("I3", f"a watch is left of what is gone: {each}")
        if cluster.workers:
            self.fail(
                "I3", f"{next(iter(cluster.workers.values())).process} runs, and no topology does"
            )

    def _left(self) -> list[str]:
        nodes = self.cluster.ensemble.tree.nodes
        found = [path for path in nodes if not path.startswith(_KEPT) and self._is_of_gone(path)]
        for name, part in self.cluster.nimbuses.items():
            found += [f"{name}: {key}" for key in stored(part.host) if self._is_of_gone(key)]
        return found

    def _watched(self) -> list[str]:
        """Watches of topologies that are gone, in words."""
        tables = [
            table
            for each in self.cluster.ensemble.servers
            for table in (each.watches.data, each.watches.child)
        ]
        return [
            f"{path} of {next(iter(of)).label}"
            for table in tables
            for path, of in table.items()
            if not path.startswith(_KEPT) and self._is_of_gone(path)
        ]

    def _is_of_gone(self, path: str) -> bool:
        """Whether a node or a blob belongs to a topology that is gone."""
        ids = set(self.cluster.rules.ever.values()) - self.bases().keys()
        return any(part in ids or _of(part, ids) for part in path.split("/"))


def _overlap(one: Command, other: Command) -> bool:
    """Whether the other was under way at some moment of the one."""
    return (
        one.ended is not None
        and other.begun <= one.ended
        and (other.ended is None or other.ended >= one.begun)
    )


def _of(part: str, ids: set[str]) -> bool:
    # A later version of its code is called ID.NUMBER.
    return any(part.startswith((f"{topology_id}-storm", f"{topology_id}.")) for topology_id in ids)


def _gone(command: object) -> bool:
    process = getattr(command, "process", None)
    return process is None or process.dead
