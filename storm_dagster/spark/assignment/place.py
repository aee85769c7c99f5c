"""Runs in Spark, for all topologies in parallel: executors into the seats of their topology."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pyarrow as pa

from storm_dagster.model.placement_reasons import Reason, even_ignores
from storm_dagster.spark.assignment.even import even_shares, even_wishes
from storm_dagster.spark.assignment.fill import Filling, Worker, shared_out
from storm_dagster.spark.assignment.past import KEPT, LOST, Executors, Past, read_past
from storm_dagster.spark.assignment.schema import PLACED
from storm_dagster.spark.assignment.stay import Reused, who_stays

__all__ = ["place_tasks"]

Row = dict[str, Any]


def place_tasks(key: tuple[pa.Scalar, ...], units: pa.Table, rows: pa.Table) -> pa.Table:
    """The filled workers of one topology, those that stay as they are among them."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows.to_pylist():
        by_kind.setdefault(row["kind"], []).append(row)
    (about,) = (json.loads(row["text"]) for row in by_kind.pop("about"))
    seats = sorted(by_kind.pop("seat", ()), key=lambda row: row["seat"])
    failed = by_kind.pop("failed", ())
    freed = {row["ref"] for row in by_kind.pop("freed", ())}
    placing = _Placing(about, units, [row for part in by_kind.values() for row in part])
    if failed:
        placing.fail(failed[0]["text"])
    else:
        placing.stay(freed)
        if seats:
            placing.fill(seats, freed)
    if placing.out and not failed and (warnings := placing.warnings()):
        placing.out[0]["text"] = json.dumps(warnings)
    for row in placing.out:
        row.update(cluster=key[0].as_py(), topology=key[1].as_py())
    return pa.table({name: [row.get(name) for row in placing.out] for name in PLACED.names}, schema=PLACED)


class _Placing:
    """One topology's executors on their way into workers."""

    def __init__(self, about: Row, units: pa.Table, past: list[Row]) -> None:
        self.about = about
        self.executors = Executors(units)
        self.past: Past | None = read_past(about, self.executors, past) if past else None
        self.out: list[Row] = []

    @property
    def needed(self) -> list[int]:
        """Executors that the event places."""
        return list(range(len(self.executors.unit))) if self.past is None else self.past.needed

    def warnings(self) -> list[str]:
        """Wishes that are not followed."""
        if self.about["strategy"] == "even":
            ignored = [*even_wishes(self.about), *(["use.old.assignment"] if self.about["use_old"] else [])]
            return [even_ignores(ignored)] if ignored else []
        balances = self.about["strategy"] == "balanced" and self.past is not None and self.past.needed
        return self.past.warnings if self.past is not None and balances else []

    def fail(self, failure: str) -> None:
        """Lists the executors that have no worker now; in a rebalance all others stay where they are."""
        without = self.needed
        if self.past is not None and self.about["event"] == "rebalance":
            settled = {position for worker in self.past.old for position in worker.holds}
            without = [position for position in without if position not in settled]
        self.out.append({"text": failure, "units": [self.executors.unit[position] for position in without]})

    def stay(self, freed: set[int]) -> None:
        """Lists the workers that the event does not touch."""
        for number, worker in enumerate(self.past.old if self.past else ()):
            if worker.state == LOST or number in freed or not worker.holds:
                continue
            kept = worker.state == KEPT
            seat = {
                "node": worker.node,
                "host": worker.host,
                "port": worker.port,
                "why": int(Reason.SLOT_KEPT if kept else Reason.SLOT_UNSTOPPED),
            }
            task_why = int(Reason.KEPT if kept else Reason.UNSTOPPED)
            self._list(seat, worker.holds, [task_why] * len(worker.holds), worker.memory, worker.cpu)

    def fill(self, seats: list[Row], freed: set[int]) -> None:
        """Fills the seats as the strategy wants it."""
        if self.about["strategy"] == "even":
            self._deal(seats, freed)
        elif self.about["strategy"] == "local":
            needed = self.needed
            self._list(seats[0], needed, [int(Reason.LOCAL)] * len(needed), 0, 0)
        else:
            self._balance(seats)

    def _list(self, seat: Row, positions: list[int], reasons: list[int], memory: int, cpu: int) -> None:
        if not positions:
            return
        self.out.append(
            {
                "node": seat["node"],
                "host": seat["host"],
                "port": seat["port"],
                "why": seat["why"],
                "seat": len(self.out),
                "against": seat.get("text"),
                "memory": memory if memory and memory > 0 else self.about["memory"],
                "cpu": cpu if cpu and cpu > 0 else self.about["cpu"],
                "units": [self.executors.unit[position] for position in positions],
                "reasons": reasons,
            }
        )

    def _stays(
        self, seats: list[Row], loose: set[int], share: int, apart: dict[int, set[str]]
    ) -> dict[int, list[int]]:
        """Seat number -> executors that stay there, for seats that are used on."""
        if self.past is None:
            return {}
        tasks = self.executors.tasks() if "size" in self.executors.columns else None
        reused: dict[int, Reused] = {}
        for index, seat in enumerate(seats):
            if seat["role"] not in ("reuse", "fuller"):
                continue
            worker = self.past.old[seat["ref"]]
            holds = [position for position in worker.holds if position in loose]
            weights = [len(worker.tasks.intersection(tasks[p])) for p in holds] if tasks else [1] * len(holds)
            limit = share + (seat["role"] == "fuller")
            reused[index] = Reused((seat["node"], seat["port"]), holds, weights, limit)
        system = {self.about["acker"], self.about["master"]}
        return who_stays(reused, self.executors.component, apart, system)

    def _balance(self, seats: list[Row]) -> None:
        about, component = self.about, self.executors.component
        claims = self.past.claims if self.past else []
        loose = self.past.loose() if self.past else self.needed
        workers = [Worker(seat["node"]) for seat in seats]
        open_workers: list[Worker] = []
        for seat, worker in zip(seats, workers, strict=True):
            if seat["role"] == "master":
                alone = next(position for position in loose if component[position] == about["master"])
                worker.put(alone, about["master"], Reason.MASTER)
                loose = [position for position in loose if position != alone]
                continue
            open_workers.append(worker)
            if seat["role"] == "claim":
                claim = claims[seat["ref"]]
                for position in claim.holds:
                    worker.put(position, component[position], Reason.OLD if claim.old else Reason.USER)
        share, rest = shared_out((len(worker.positions) for worker in open_workers), len(loose))
        apart = self._apart(open_workers)
        stays = self._stays(seats, set(loose), share, apart)
        for index, positions in stays.items():
            for position in positions:
                workers[index].put(position, component[position], Reason.STAYS)
            rest -= len(positions) > share
        staying = {position for positions in stays.values() for position in positions}
        self._choose(
            [p for p in loose if p not in staying],
            Filling(open_workers, share, rest, about["related"]),
            apart,
        )
        for seat, worker in zip(seats, workers, strict=True):
            memory, cpu = 0, 0
            if seat["role"] == "claim":
                memory, cpu = claims[seat["ref"]].memory, claims[seat["ref"]].cpu
            if about["master_memory"] is not None and about["master"] in worker.counts:
                memory = about["master_memory"]
            self._list(seat, worker.positions, worker.reasons, memory, cpu)

    def _apart(self, workers: list[Worker]) -> dict[int, set[str]]:
        """Component that must be apart -> supervisors that hold one of it already."""
        apart: dict[int, set[str]] = {component: set() for component in self.about["differ"]}
        held = [
            (worker.node, self.executors.component[position])
            for worker in (self.past.old if self.past and apart else ())
            if worker.state != LOST
            for position in worker.holds
        ]
        held.extend((worker.node, component) for worker in workers for component in worker.counts)
        for node, component in held:
            if component in apart:
                apart[component].add(node)
        return apart

    def _choose(self, waiting: list[int], filling: Filling, apart: dict[int, set[str]]) -> None:
        """Executors that must be apart first, then the user's, then the system's; each by task id."""
        component = self.executors.component
        system = {self.about["acker"], self.about["master"]}
        users: list[int] = []
        systems: list[int] = []
        for position in waiting:
            kind = component[position]
            if kind in apart:
                filling.place_apart(position, kind, apart[kind], kind in system)
            else:
                (systems if kind in system else users).append(position)
        for part, is_system in ((users, False), (systems, True)):
            for kind, run in groupby(part, key=component.__getitem__):
                filling.place_run(run, kind, is_system)

    def _deal(self, seats: list[Row], freed: set[int]) -> None:
        """Round robin, by ascending task id, over the seats that are below their share."""
        waiting = self.needed
        stays: dict[int, list[int]] = {}
        shares = even_shares(len(waiting), len(seats))
        if self.past is not None and freed:
            waiting = sorted([*waiting, *(p for number in freed for p in self.past.old[number].holds)])
            shares = even_shares(len(waiting), len(seats))
        else:
            stays = self._stays(seats, set(waiting), shares[-1], {})
        here = {position for positions in stays.values() for position in positions}
        filled = [list(stays.get(index, ())) for index in range(len(seats))]
        reasons = [[int(Reason.STAYS)] * len(positions) for positions in filled]
        ranked = sorted(range(len(seats)), key=lambda index: -len(filled[index]))
        share_of = dict(zip(ranked, shares, strict=True))
        turn = 0
        for position in waiting:
            if position in here:
                continue
            while len(filled[turn]) >= share_of[turn]:
                turn = (turn + 1) % len(seats)
            filled[turn].append(position)
            reasons[turn].append(int(Reason.DEALT))
            turn = (turn + 1) % len(seats)
        for seat, positions, whys in zip(seats, filled, reasons, strict=True):
            self._list(seat, positions, whys, 0, 0)
