"""Assignment of executors to the slots of their topology. Runs in Spark, for all topologies in parallel."""

from __future__ import annotations

import json
from itertools import groupby

import pyarrow as pa

from storm_dagster.model.placement_reasons import Reason, even_ignores
from storm_dagster.spark.assignment.even import even_shares, unsupported_requests
from storm_dagster.spark.assignment.history import KEPT, LOST, EventHistory, Executors, read_history
from storm_dagster.spark.assignment.reuse import Reused, keep_executors
from storm_dagster.spark.assignment.schema import PLACED, Row
from storm_dagster.spark.assignment.selectors import FilledWorker, WorkerSelector, fair_share


def assign_tasks(key: tuple[pa.Scalar, ...], units: pa.Table, rows: pa.Table) -> pa.Table:
    """Rows of all workers of one topology, those that stay as they are included."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows.to_pylist():
        by_kind.setdefault(row["kind"], []).append(row)
    (about,) = (json.loads(row["text"]) for row in by_kind.pop("about"))
    slots = sorted(by_kind.pop("slot", ()), key=lambda row: row["number"])
    failed = by_kind.pop("failed", ())
    freed = {row["ref"] for row in by_kind.pop("freed", ())}
    assignment = _TaskAssignment(about, units, [row for part in by_kind.values() for row in part])
    if failed:
        assignment.fail(failed[0]["text"])
    else:
        assignment.stay(freed)
        if slots:
            assignment.fill(slots, freed)
    if assignment.out and not failed and (warnings := assignment.warnings()):
        assignment.out[0]["text"] = json.dumps(warnings)
    for row in assignment.out:
        row.update(cluster=key[0].as_py(), topology=key[1].as_py())
    return pa.Table.from_pylist(assignment.out, schema=PLACED)


class _TaskAssignment:
    """Assignment of one topology's executors to workers."""

    def __init__(self, about: Row, units: pa.Table, history: list[Row]) -> None:
        self.about = about
        self.executors = Executors(units)
        self.history: EventHistory | None = read_history(about, self.executors, history) if history else None
        self.out: list[Row] = []

    @property
    def needed(self) -> list[int]:
        """Executors that the event places."""
        return list(range(len(self.executors.unit))) if self.history is None else self.history.needed

    def warnings(self) -> list[str]:
        """Warnings about requests that are not followed."""
        if self.about["strategy"] == "even":
            ignored = [
                *unsupported_requests(self.about),
                *(["use.old.assignment"] if self.about["use_old"] else []),
            ]
            return [even_ignores(ignored)] if ignored else []
        balances = self.about["strategy"] == "balanced" and self.history is not None and self.history.needed
        return self.history.warnings if self.history is not None and balances else []

    def fail(self, failure: str) -> None:
        """List the executors that have no worker now; in a rebalance all others stay where they are."""
        without = self.needed
        if self.history is not None and self.about["event"] == "rebalance":
            held = {position for worker in self.history.old for position in worker.holds}
            without = [position for position in without if position not in held]
        self.out.append({"text": failure, "units": [self.executors.unit[position] for position in without]})

    def stay(self, freed: set[int]) -> None:
        """List the workers that the event does not touch."""
        for number, worker in enumerate(self.history.old if self.history else ()):
            if worker.state == LOST or number in freed or not worker.holds:
                continue
            kept = worker.state == KEPT
            slot = {
                "node": worker.node,
                "host": worker.host,
                "port": worker.port,
                "why": int(Reason.SLOT_KEPT if kept else Reason.SLOT_UNSTOPPED),
            }
            task_why = int(Reason.KEPT if kept else Reason.UNSTOPPED)
            self._list(slot, worker.holds, [task_why] * len(worker.holds), worker.memory, worker.cpu)

    def fill(self, slots: list[Row], freed: set[int]) -> None:
        """Fill the slots by the rules of the strategy."""
        if self.about["strategy"] == "even":
            self._deal(slots, freed)
        elif self.about["strategy"] == "local":
            needed = self.needed
            self._list(slots[0], needed, [int(Reason.LOCAL)] * len(needed), 0, 0)
        else:
            self._balance(slots)

    def _list(self, slot: Row, positions: list[int], reasons: list[int], memory: int, cpu: int) -> None:
        if not positions:
            return
        self.out.append(
            {
                "node": slot["node"],
                "host": slot["host"],
                "port": slot["port"],
                "why": slot["why"],
                "number": len(self.out),
                "against": slot.get("text"),
                "memory": memory if memory and memory > 0 else self.about["memory"],
                "cpu": cpu if cpu and cpu > 0 else self.about["cpu"],
                "units": [self.executors.unit[position] for position in positions],
                "reasons": reasons,
            }
        )

    def _stays(
        self, slots: list[Row], unassigned: set[int], share: int, apart: dict[int, set[str]]
    ) -> dict[int, list[int]]:
        """Slot number -> executors that stay there, for reused slots."""
        if self.history is None:
            return {}
        tasks = self.executors.tasks() if "size" in self.executors.columns else None
        reused: dict[int, Reused] = {}
        for index, slot in enumerate(slots):
            if slot["role"] not in ("reuse", "fuller"):
                continue
            worker = self.history.old[slot["ref"]]
            holds = [position for position in worker.holds if position in unassigned]
            weights = [len(worker.tasks.intersection(tasks[p])) for p in holds] if tasks else [1] * len(holds)
            limit = share + (slot["role"] == "fuller")
            reused[index] = Reused((slot["node"], slot["port"]), holds, weights, limit)
        system = {self.about["acker"], self.about["master"]}
        return keep_executors(reused, self.executors.component, apart, system)

    def _balance(self, slots: list[Row]) -> None:
        about, component = self.about, self.executors.component
        requested = self.history.requested if self.history else []
        unassigned = self.history.unassigned() if self.history else self.needed
        workers = [FilledWorker(slot["node"]) for slot in slots]
        open_workers: list[FilledWorker] = []
        for slot, worker in zip(slots, workers, strict=True):
            if slot["role"] == "master":
                alone = next(position for position in unassigned if component[position] == about["master"])
                worker.put(alone, about["master"], Reason.MASTER)
                unassigned = [position for position in unassigned if position != alone]
                continue
            open_workers.append(worker)
            if slot["role"] == "requested":
                wanted = requested[slot["ref"]]
                for position in wanted.holds:
                    worker.put(position, component[position], Reason.OLD if wanted.old else Reason.USER)
        share, remainder = fair_share((len(worker.positions) for worker in open_workers), len(unassigned))
        apart = self._apart(open_workers)
        stays = self._stays(slots, set(unassigned), share, apart)
        for index, positions in stays.items():
            for position in positions:
                workers[index].put(position, component[position], Reason.STAYS)
            remainder -= len(positions) > share
        staying = {position for positions in stays.values() for position in positions}
        self._choose(
            [p for p in unassigned if p not in staying],
            WorkerSelector(open_workers, share, remainder, about["related"]),
            apart,
        )
        for slot, worker in zip(slots, workers, strict=True):
            memory, cpu = 0, 0
            if slot["role"] == "requested":
                memory, cpu = requested[slot["ref"]].memory, requested[slot["ref"]].cpu
            if about["master_memory"] is not None and about["master"] in worker.counts:
                memory = about["master_memory"]
            self._list(slot, worker.positions, worker.reasons, memory, cpu)

    def _apart(self, workers: list[FilledWorker]) -> dict[int, set[str]]:
        """Component that must be apart -> supervisors that hold one of it already."""
        apart: dict[int, set[str]] = {component: set() for component in self.about["differ"]}
        held = [
            (worker.node, self.executors.component[position])
            for worker in (self.history.old if self.history and apart else ())
            if worker.state != LOST
            for position in worker.holds
        ]
        held.extend((worker.node, component) for worker in workers for component in worker.counts)
        for node, component in held:
            if component in apart:
                apart[component].add(node)
        return apart

    def _choose(self, waiting: list[int], selector: WorkerSelector, apart: dict[int, set[str]]) -> None:
        """Select workers for executors that must be apart, then the user's, then the system's; each by task id."""
        component = self.executors.component
        system = {self.about["acker"], self.about["master"]}
        users: list[int] = []
        systems: list[int] = []
        for position in waiting:
            kind = component[position]
            if kind in apart:
                selector.place_apart(position, kind, apart[kind], kind in system)
            else:
                (systems if kind in system else users).append(position)
        for part, is_system in ((users, False), (systems, True)):
            for kind, run in groupby(part, key=component.__getitem__):
                selector.place_run(run, kind, is_system)

    def _deal(self, slots: list[Row], freed: set[int]) -> None:
        """Assign executors round robin, by ascending task id, to slots that are below their share."""
        waiting = self.needed
        stays: dict[int, list[int]] = {}
        shares = even_shares(len(waiting), len(slots))
        if self.history is not None and freed:
            waiting = sorted([*waiting, *(p for number in freed for p in self.history.old[number].holds)])
            shares = even_shares(len(waiting), len(slots))
        else:
            stays = self._stays(slots, set(waiting), shares[-1], {})
        here = {position for positions in stays.values() for position in positions}
        filled = [list(stays.get(index, ())) for index in range(len(slots))]
        reasons = [[int(Reason.STAYS)] * len(positions) for positions in filled]
        ranked = sorted(range(len(slots)), key=lambda index: -len(filled[index]))
        share_of = dict(zip(ranked, shares, strict=True))
        turn = 0
        for position in waiting:
            if position in here:
                continue
            while len(filled[turn]) >= share_of[turn]:
                turn = (turn + 1) % len(slots)
            filled[turn].append(position)
            reasons[turn].append(int(Reason.DEALT))
            turn = (turn + 1) % len(slots)
        for slot, positions, whys in zip(slots, filled, reasons, strict=True):
            self._list(slot, positions, whys, 0, 0)
