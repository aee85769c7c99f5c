"""The general program of one seed: a cluster, commands and faults at random, then the checks of a
calm cluster.
"""

from __future__ import annotations

import time as real_time
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from storm_simulation.calm import Calm
from storm_simulation.cluster import Cluster, Violation
from storm_simulation.faults import Faults
from storm_simulation.healing_faults import KINDS

_NAMES = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Pace:
    """How faults follow each other."""

    between: float
    """Mean time between two of them."""
    scale: float
    """How long they last, by the usual time."""
    most: int
    """Faults that are not mended yet, at most: a cluster in which nothing is well does nothing that
    could go wrong.
    """


PACES = (Pace(0.1, 0.1, 8), Pace(0.1, 0.2, 12), Pace(0.4, 0.4, 8), Pace(2.0, 1.0, 16))


@dataclass(frozen=True)
class Plan:
    """What a seed chose before anything runs."""

    servers: int
    nimbuses: int
    supervisors: int
    minimum: int
    faults: tuple[str, ...]
    pace: Pace
    command_secs: float
    verbs: tuple[str, ...]
    preemption: float
    drift: float
    crashes: float
    """Share of the commands whose process ends at one of its steps."""
    isolated: bool
    """One topology is isolated on a host, and another one keeps a slot free."""
    leader_changes: float
    """Share of the commands at one of whose steps the leader changes."""

    @staticmethod
    def of(seed: int) -> Plan:
        """Swarm: each seed runs some kinds of faults and commands, so that none drowns the
        others.
        """
        rng = Random(f"plan {seed}")
        kinds = sorted(KINDS)
        nimbuses = rng.choice((1, 2, 2, 3, 3))
        verbs = ["submit", "kill", "rebalance", "activate", "deactivate", "update", "restart"]
        upgrades = (
            ["gray_upgrade", "gray_upgrade", "complete_upgrade", "roll_back"]
            if rng.random() < 0.5
            else []
        )
        chosen = rng.sample(kinds, rng.choice((3, 6, 12, len(kinds))))
        # What has something to hit only at times.
        chosen += [kind for kind in chosen if kind.startswith(("leader ", "run "))]
        servers = rng.choice((1, 1, 3))
        if servers > 1:
            # Only there can they happen.
            chosen += ["server cut off", "follower lags"] * (1 + len(chosen) // 6)
        if rng.random() < 0.5:
            # What ends sessions while their processes go on: the hardest for one owner of each
            # task.
            hard = [
                "host cut off",
                "host frozen",
                "worker frozen",
                "worker hangs",
                "workers hang, cut off",
            ]
            chosen += hard * (1 + len(chosen) // 6)
        plan = Plan(
            servers=servers,
            nimbuses=nimbuses,
            supervisors=rng.choice((3, 4, 5)),
            minimum=min(nimbuses, rng.choice((1, 2))),
            faults=tuple(chosen),
            pace=rng.choice(PACES),
            command_secs=rng.choice((1.0, 3.0, 8.0)),
            verbs=(
                *sorted({"submit", "kill", "rebalance", *rng.sample(verbs, rng.choice((1, 3, 7)))}),
                *upgrades,
            ),
            preemption=rng.choice((0.0, 0.002, 0.02)),
            drift=rng.choice((0.0, 0.0, 0.003)),
            crashes=rng.choice((0.0, 0.2, 0.5)),
            isolated=rng.random() < 0.3,
            leader_changes=rng.choice((0.0, 0.0, 0.3)),
        )
        # The other hosts have slots for everything, also while the isolated one is lost.
        return replace(plan, supervisors=5) if plan.isolated else plan


@dataclass
class Result:
    """What came of one seed."""

    seed: int
    secs: float
    digest: str = ""
    violation: str | None = None
    virtual_secs: float = 0.0
    cpu_secs: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    healing_runs: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    reads: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def replay(self) -> str:
        return f'make simulate ARGS="--seed {self.seed} --secs {self.secs:g}"'


def run_seed(
    seed: int, secs: float = 120.0, *, calm: bool = True, conf: dict[str, Any] | None = None
) -> Result:
    """Run the program of that seed; its violation, if any, is in the result."""
    plan = Plan.of(seed)
    result = Result(seed, secs)
    began = real_time.process_time()
    settings = {
        "topology.min.replication.count": plan.minimum,
        # Garbage goes within minutes, so that what stays is seen.
        "nimbus.cleanup.inbox.freq.secs": 30,
        "nimbus.inbox.jar.expiration.secs": 60,
        **(conf or {}),
    }
    with Cluster(
        seed,
        servers=plan.servers,
        nimbus_count=plan.nimbuses,
        supervisor_count=plan.supervisors,
        conf=settings,
    ) as cluster:
        faults = Faults(cluster)
        try:
            _chaos(cluster, plan, faults, secs)
            if calm:
                Calm(cluster, faults).check()
        except Violation as violation:
            result.violation = str(violation)
        result.digest = cluster.ensemble.digest()
        result.virtual_secs = cluster.kernel.now
        result.faults = faults.counts
        result.faults["run killed at a step"] = cluster.crashed_at_steps
        result.faults["leader changed at a step"] = cluster.leaders_changed_at_steps
        result.faults["preemption"] = cluster.kernel.preemptions
        result.faults["reply lost"] = cluster.links.lost_replies + cluster.web.lost_replies
        result.faults["message slow"] = cluster.links.slow_answers
        result.commands = Counter(
            f"{each.verb} {'done' if each.acknowledged else 'refused' if each.ended is not None else 'lost'}"
            for each in cluster.commands
        )
        result.known = cluster.known
        result.healing_runs = cluster.dagster.healing_runs.counts
        result.commits = cluster.rules.checked
        result.reads = cluster.ensemble.reads
        result.log = [f"plan: {plan}", *faults.log, *map(str, cluster.commands)]
    result.cpu_secs = real_time.process_time() - began
    return result


def _chaos(cluster: Cluster, plan: Plan, faults: Faults, secs: float) -> None:
    rng = cluster.kernel.rng
    for host in cluster.hosts.values():
        host.drift = rng.uniform(-plan.drift, plan.drift)
    cluster.start()
    for name in _NAMES[: rng.choice((1, 2, 3))]:
        workers = rng.choice((1, 2, 3))
        single = workers > 1 and (
            rng.random() < 0.8 if "gray_upgrade" in plan.verbs else rng.random() < 0.2
        )
        cluster.command(
            "submit",
            name,
            token=f"first-{name}",
            workers=workers,
            single=single,
            conf=_limits(plan, name),
        )
    cluster.run(rng.uniform(2.0, 15.0))
    cluster.kernel.preemption = plan.preemption
    end = cluster.kernel.now + secs
    next_fault = cluster.kernel.now + rng.expovariate(1 / plan.pace.between)
    next_command = cluster.kernel.now + rng.expovariate(1 / plan.command_secs)
    while cluster.kernel.now < end:
        at = min(next_fault, next_command, end)
        cluster.run(max(0.0, at - cluster.kernel.now))
        if at == next_fault:
            next_fault += rng.expovariate(1 / plan.pace.between)
            if len(faults.open) < plan.pace.most:
                faults.inject_one_of(plan.faults, plan.pace.scale * _duration(rng))
        elif at == next_command:
            next_command += rng.expovariate(1 / plan.command_secs)
            _command(cluster, plan)


def _limits(plan: Plan, name: str) -> dict[str, Any]:
    """Keys of a topology's conf that limit the slots it may use."""
    if plan.isolated and name == "a":
        return {"isolation.scheduler.machines": ["s1"]}
    if plan.isolated and name == "b":
        return {"jstorm.reserve.workers": 1}
    return {}


def _duration(rng: Random) -> float:
    """Mostly short; sometimes longer than every timeout."""
    return rng.choice((0.3, 1.0, 1.0, 3.0, 6.0, 15.0, 50.0)) * rng.uniform(0.5, 1.5)


def _command(cluster: Cluster, plan: Plan) -> None:
    rng = cluster.kernel.rng
    if sum(each.ended is None for each in cluster.commands[-20:]) > 6:
        return
    verb, name = _choice(cluster, plan)
    _begin(cluster, plan, verb, name)
    if rng.random() < 0.4:
        # A second one on the same name, while the first goes on.
        cluster.run(rng.choice((0.0, 0.05, 0.3, 1.0)) * rng.random())
        _begin(cluster, plan, verb if rng.random() < 0.3 else _verb(rng, plan), name)


def _verb(rng: Random, plan: Plan) -> str:
    return rng.choices(plan.verbs, [0.4 if verb == "kill" else 1.0 for verb in plan.verbs])[0]


def _choice(cluster: Cluster, plan: Plan) -> tuple[str, str]:
    """Mostly what can be done: a submission of a name that is free, anything else of one that is
    taken.
    """
    rng = cluster.kernel.rng
    verb = _verb(rng, plan)
    alive = {base.name for base in cluster.rules.bases.values()}
    upgrading = {base.name for base in cluster.rules.bases.values() if base.status == "UPGRADING"}
    if verb in ("complete_upgrade", "roll_back"):
        verb, alive = (verb, upgrading) if upgrading else ("gray_upgrade", alive)
    likely = sorted(set(_NAMES) - alive if verb == "submit" else alive)
    return verb, rng.choice(likely if likely and rng.random() < 0.9 else _NAMES)


def _begin(cluster: Cluster, plan: Plan, verb: str, name: str) -> None:
    rng = cluster.kernel.rng
    options: dict[str, Any] = {}
    if verb in ("submit", "update", "gray_upgrade"):
        options["token"] = f"t{len(cluster.commands)}"
    if verb in ("submit", "update"):
        options |= {"workers": rng.choice((1, 2, 3)), "archive": rng.randrange(4)}
    if verb == "submit":
        options["conf"] = _limits(plan, name)
        options["single"] = options["workers"] > 1 and "gray_upgrade" in plan.verbs
    if verb == "gray_upgrade":
        options |= {
            "number": rng.choice((1, 1, 2)),
            "more": rng.random() < 0.4,
            "archive": rng.randrange(4),
        }
    if verb == "rebalance":
        options |= {"workers": rng.choice((1, 2, 3, 4)), "reassign": rng.random() < 0.5}
    if verb == "kill":
        options["wait"] = rng.choice((0, 0, 2))
    if rng.random() < plan.crashes:
        # At any step, at one of the first, or at one of the last: between what is published and
        # what makes it count.
        most, last = rng.choice((3, 10, 27)), cluster.steps_of.get(verb, 0)
        options["crash_at"] = (
            rng.randint(1, most)
            if rng.random() < 0.7
            else rng.randint(max(1, last - 5), max(1, last))
        )
    if rng.random() < plan.leader_changes:
        options["leader_changes_at"] = rng.randint(1, max(6, cluster.steps_of.get(verb, 0)))
    cluster.command(verb, name, **options)
