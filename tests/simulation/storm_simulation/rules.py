"""Invariants that hold at every write: each commit is looked at as it lands."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kazoo.protocol.serialization import CheckVersion, SetData

from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt, StormDagsterError
from storm_dagster.model.healing_pause import HealingPause
from storm_dagster.model.names import code_key, conf_key, id_of_blob_key, jar_key
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.records import (
    HEALING,
    Assignment,
    EpochRecord,
    GrayUpgrade,
    StormBase,
    decode_record,
)
from storm_simulation.commands import owner_by
from storm_simulation.ensemble import Commit
from storm_simulation.kernel import EPOCH, Host

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster
    from storm_simulation.workers import SimulatedWorker

ROOT = "/storm"
_REPLACING = ("update",)
_PAUSE_GRACE_MS = 59_000
"""Time after the end of a pause from which on it may be over without a leader that ends it."""
_JUMP_SECS = 60.0
"""Time after a jump of a clock in which a process may still act by the former time."""


class Rules:
    """The checks, with what they remember of the state before each write."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.bases: dict[str, StormBase] = {}
        """Topology id -> its base as last written."""
        self.ever: dict[str, str] = {}
        """Client token -> topology id that it made."""
        self.assignments: dict[str, Assignment] = {}
        self._upgrades: dict[str, tuple[GrayUpgrade, str]] = {}
        """Topology id -> its gray upgrade under way, and the code that it began with."""
        self.rolled_back: set[str] = set()
        """Code that no worker may run any more."""
        self._owners: dict[str, int] = {}
        self._tokens: dict[str, str] = {}
        self.pause: HealingPause | None = None
        """Pause of healing by operators."""
        self.checked = 0
        self.tainted: set[str] = set()
        """Names of topologies whose state is wrong already, by a violation that was counted."""
        cluster.ensemble.observers.append(self.look)

    def _violated(self, invariant: str, text: str) -> None:
        self._cluster.violated(invariant, text)

    def look(self, commit: Commit) -> None:
        self.checked += 1
        self._guarded(commit)
        self._own_ephemerals(commit)
        before = dict(self.bases)
        last = {path: kind for kind, path in commit.happened if kind != "CHILD"}
        for full, kind in last.items():
            path = full.removeprefix(ROOT)
            first, _, rest = path[1:].partition("/")
            node = commit.tree.nodes.get(full)
            data = None if node is None else node.data
            if first == "gray_upgrade" and "/" in rest:
                topology_id, _, part = rest.partition("/")
                self._upgrade(topology_id, part, data, created=kind == "CREATED")
            if first == "healing_pause":
                self._pause(data)
            if not rest or "/" in rest:
                continue
            if first == "topology":
                self._base(commit, rest, data, before, created=kind == "CREATED")
            elif first == "assignments":
                self._assignment(commit, rest, data)
            elif first == "tokens":
                self._token(rest, data)

    # -- one after the other -----------------------------------------------------------------------

    def _guarded(self, commit: Commit) -> None:
        if commit.session is None:
            return
        epoch = ROOT + paths.EPOCH
        fenced = any(
            isinstance(each, CheckVersion | SetData) and each.path == epoch
            for each in commit.operations
        )
        if fenced:
            self._led(commit, epoch)
            return
        for _, path in commit.happened:
            below = path.removeprefix(ROOT)
            if below.startswith((paths.TOPOLOGY + "/", paths.ASSIGNMENTS + "/")):
                self._violated(
                    "I5", f"{commit.session.label} wrote {below} without a check of the epoch"
                )
                return

    def _led(self, commit: Commit, epoch: str) -> None:
        """A nimbus that writes for an epoch holds it."""
        assert commit.session is not None
        kind, _, host = commit.session.label.partition("-")
        node = commit.tree.nodes.get(epoch)
        if kind == "nimbus" and node is not None and node.data:
            leader = decode_record(EpochRecord, node.data).leader.partition(":")[0]
            if leader != host:
                self._violated(
                    "I5",
                    f"{commit.session.label} wrote in the epoch of {leader}: {commit.happened[0][1]}",
                )

    def _own_ephemerals(self, commit: Commit) -> None:
        created = {path for kind, path in commit.happened if kind == "CREATED"}
        for kind, path in commit.happened:
            if kind == "CREATED":
                owner = commit.tree.nodes[path].owner if path in commit.tree.nodes else 0
                if owner:
                    self._owners[path] = owner
            elif kind == "DELETED" and path not in created:
                owner = self._owners.pop(path, 0)
                mine = (
                    commit.session is None
                    or owner == commit.session.id
                    or self._of_itself(commit, path)
                )
                if owner and not mine and self._may_not_delete(path.removeprefix(ROOT)):
                    assert commit.session is not None
                    self._violated(
                        "I5",
                        f"{commit.session.label} deleted {path}, which belongs to another session",
                    )

    @staticmethod
    def _of_itself(commit: Commit, path: str) -> bool:
        """Whether the node is that of an earlier session of the same daemon."""
        assert commit.session is not None
        _, _, host = commit.session.label.partition("-")
        return path.rpartition("/")[2].partition(":")[0] == host

    def _may_not_delete(self, path: str) -> bool:
        if path.startswith(paths.BLOBSTORE):
            return False
        if path.startswith(paths.WORKERS + "/"):
            base = self.bases.get(path.split("/")[2])
            return base is not None and base.status != "KILLED"
        return True

    def _base(
        self,
        commit: Commit,
        topology_id: str,
        data: bytes | None,
        all_before: dict[str, StormBase],
        *,
        created: bool,
    ) -> None:
        before = self.bases.pop(topology_id, None)
        if data is None:
            return
        base = self.bases[topology_id] = decode_record(StormBase, data)
        if before is not None and before.status == "KILLED" and base.status != "KILLED":
            self._violated("acknowledged", f"{topology_id} was killed and is {base.status} again")
        if before is None and created:
            self._published(commit, topology_id, base, all_before)
        if before is not None and base.status == "REBALANCING" != before.status:
            self._planned(commit, topology_id)
        if before is not None and before.status == "UPGRADING" and base.status == "ACTIVE":
            self._owner(topology_id, base)

    def _planned(self, commit: Commit, topology_id: str) -> None:
        """A rebalance silences no spout with a plan that a healing may have overtaken."""
        path = ROOT + paths.ASSIGNMENTS
        if not any(
            isinstance(each, CheckVersion) and each.path == path for each in commit.operations
        ):
            self._violated(
                "plan", f"a rebalance of {topology_id} began without a check of its plan"
            )

    def _owner(self, topology_id: str, base: StormBase) -> None:
        """A completed gray upgrade leaves the base that the new conf describes."""
        upgrade, assignment = base.last_upgrade, self.assignments.get(topology_id)
        if upgrade is None or assignment is None or assignment.code_dir != upgrade.code_dir:
            return
        expected = owner_by(upgrade.token)
        if base.owner != expected:
            self._violated(
                "conf", f"{topology_id} belongs to {base.owner!r}, its conf says {expected!r}"
            )

    def _published(
        self, commit: Commit, topology_id: str, base: StormBase, before: dict[str, StormBase]
    ) -> None:
        for other, its in self.bases.items():
            if other != topology_id and its.name == base.name:
                self._violated(
                    "I6",
                    f"{topology_id} was published beside {other} ({its.status}) of the same name",
                )
        made = self.ever.setdefault(base.token or topology_id, topology_id)
        if made != topology_id:
            self._violated("I6", f"token {base.token} made {made} and {topology_id}")
        label = commit.session.label if commit.session is not None else ""
        replaced = [
            path
            for kind, path in commit.happened
            if kind == "DELETED" and path.startswith(f"{ROOT}/topology/")
        ]
        for path in replaced:
            former = before.get(path.rpartition("/")[2])
            if former is not None and former.status == "KILLED":
                self.tainted.add(base.name)
                self._violated(
                    "acknowledged", f"{label} published {topology_id} over a killed topology"
                )
        if label.startswith(_REPLACING) and not replaced:
            self.tainted.add(base.name)
            self._violated(
                "acknowledged", f"{label} published {topology_id} where nothing was alive any more"
            )
        self._copies(topology_id)

    def _copies(self, topology_id: str) -> None:
        """I4: what becomes visible is on the minimum of nimbuses, as recorded."""
        minimum = int(self._cluster.conf()["topology.min.replication.count"])
        for key in (code_key(topology_id), conf_key(topology_id), jar_key(topology_id)):
            holders = [
                name for name, part in self._cluster.nimbuses.items() if key in stored(part.host)
            ]
            if len(holders) < minimum:
                self._violated(
                    "I4",
                    f"{topology_id} was published with {key} on {len(holders)} nimbuses, not {minimum}",
                )

    def _pause(self, data: bytes | None) -> None:
        self.pause = None if data is None else decode_record(HealingPause, data)

    def _healed(self, commit: Commit, former: Assignment | None, assignment: Assignment) -> None:
        """Nothing is healed in a pause that is in force by the clock of the healer's host."""
        if self.pause is None or former is None or commit.session is None:
            return
        history = assignment.history
        if history[:1] == former.history[:1] or history[0].action != HEALING:
            return
        kind, _, name = commit.session.label.partition("-")
        host = self._cluster.hosts[name] if kind == "nimbus" else self._cluster.dagster.host
        if self._cluster.kernel.now - host.wall_jumped_at < _JUMP_SECS:
            return  # By the clock of a moment ago the pause may have been over.
        wall_ms = 1000 * (EPOCH + self._cluster.kernel.now + host.wall_offset)
        if wall_ms < self.pause.until_ms + _PAUSE_GRACE_MS:
            self._violated(
                "pause", f"{commit.session.label} healed {assignment.topology_id} in a pause"
            )

    def _assignment(self, commit: Commit, topology_id: str, data: bytes | None) -> None:
        former = self.assignments.pop(topology_id, None)
        if not data:
            return
        try:
            assignment = decode_record(Assignment, data)
        except Corrupt:
            return
        counts = Counter(task for worker in assignment.workers for task in worker.ids)
        twice = sorted(task for task, count in counts.items() if count > 1)
        if twice:
            self._violated("I1", f"tasks {twice} of {topology_id} stand in two slots")
        slots = {worker.slot for worker in assignment.workers}
        for other, its in self.assignments.items():
            shared = slots & {worker.slot for worker in its.workers}
            if shared:
                self._violated(
                    "I1", f"slot {sorted(shared)[0]} is given to {topology_id} and to {other}"
                )
        self.assignments[topology_id] = assignment
        self._healed(commit, former, assignment)

    def _token(self, token: str, data: bytes | None) -> None:
        if data is None:
            return
        topology_id = decode_record(TokenRecord, data).topology_id
        known = self._tokens.setdefault(token, topology_id)
        if known != topology_id and token in self.ever:
            self._violated("I6", f"token {token} named {known} and now {topology_id}")

    # -- gray upgrades -----------------------------------------------------------------------------

    def _upgrade(self, topology_id: str, part: str, data: bytes | None, *, created: bool) -> None:
        """I7: who counts as upgraded runs the new code, and after a rollback nobody does."""
        known, assignment = self._upgrades.get(topology_id), self.assignments.get(topology_id)
        if part.startswith("upgraded_workers/") and created and known is not None:
            host, _, port = part.partition("/")[2].rpartition(":")
            worker = self._cluster.worker_at(host, int(port))
            runs = (
                ""
                if worker is None or worker.spec.topology_id != topology_id
                else worker.spec.code_dir
            )
            if runs not in ("", known[0].code_dir):
                self._violated(
                    "I7", f"{host}:{port} counts as upgraded to {known[0].code_dir} and runs {runs}"
                )
        if part != "conf":
            return
        self._upgrades.pop(topology_id, None)
        base = self.bases.get(topology_id)
        if base is None or base.status == "KILLED" or assignment is None:
            return
        if data is not None:
            former = assignment.code_dir if known is None else known[1]
            self._upgrades[topology_id] = (decode_record(GrayUpgrade, data), former)
        elif known is not None and assignment.code_dir != known[0].code_dir:
            if assignment.code_dir != known[1]:
                self._violated(
                    "I7", f"{topology_id} was rolled back from {known[1]} to {assignment.code_dir}"
                )
            self.rolled_back.add(known[0].code_dir)
            slots = {worker.slot for worker in assignment.workers}
            for worker in self.running(known[0].code_dir):
                if (worker.spec.node, worker.spec.port) in slots:
                    self._violated(
                        "I7",
                        f"{worker.process.name} runs {worker.spec.code_dir}, which was rolled back",
                    )

    def running(self, code_dir: str) -> list[SimulatedWorker]:
        """The workers that run that code now."""
        now, workers = self._cluster.kernel.now, self._cluster.workers.values()
        return [
            each for each in workers if each.spec.code_dir == code_dir and each.leased_until() > now
        ]

    # -- blobs -------------------------------------------------------------------------------------

    def blob_dropped(self, host: Host, key: str) -> None:
        """I3: the last copy of what a live topology runs is never removed."""
        try:
            topology_id = id_of_blob_key(key)
        except StormDagsterError:
            return
        base = self.bases.get(topology_id or "")
        assignment = self.assignments.get(topology_id or "")
        if base is None or base.status == "KILLED" or assignment is None:
            return
        if key not in (
            code_key(assignment.code_dir),
            conf_key(assignment.code_dir),
            jar_key(assignment.code_dir),
        ):
            return
        if not any(key in stored(part.host) for part in self._cluster.nimbuses.values()):
            self._violated(
                "I3", f"{host.name} removed the last copy of {key}, which {topology_id} runs"
            )


def stored(host: Host) -> dict[str, object]:
    """Key -> description of the blobs on a nimbus's disk."""
    return host.files.get("blobs", {}).get("keys", {})
