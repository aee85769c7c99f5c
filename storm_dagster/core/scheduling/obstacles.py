"""Reasons, in words, for hosts and slots that a topology cannot have."""

from collections import Counter
from collections.abc import Collection, Sequence

from storm_dagster.core.usable_slots import UsableSlots, hosts_closed_to
from storm_dagster.model.multimap import multimap
from storm_dagster.model.view import ClusterView, TopologyView

_HOLDERS_NAMED = 3
"""Topologies that a text names."""
_HOSTS_CHARS = 200
"""Longest list of hosts in a text."""


def closed_hosts(view: ClusterView, placing: Collection[str], isolation: Collection[str]) -> str:
    """The hosts that the topologies ``placing`` cannot use, with the reason and the remedy.

    ``isolation`` are hosts that they are isolated on. Empty if every host is open to them.
    """
    hosts = {info.host for info in view.supervisors.values()}
    closed = hosts_closed_to(view, placing, isolation)
    blacklisted = closed.blacklisted
    isolating: set[tuple[str, str]] = set()
    for host, topologies in closed.isolated.items():
        isolating.update((host, title_with_owner(topology)) for topology in topologies)
    hosts_of = multimap((title, host) for host, title in sorted(isolating))
    is_all = hosts == blacklisted | closed.isolated.keys()
    is_one_reason = is_all and len(hosts_of) + bool(blacklisted) == 1
    reasons: list[str] = []
    for title, isolated in sorted(hosts_of.items()):
        sentence = _sentence(sorted(isolated), f"isolated by {title}", is_all=is_one_reason)
        reasons.append(f"{sentence}: kill it, or submit it without isolation.scheduler.machines")
    draining = {info.host for info in view.supervisors.values() if info.draining} - blacklisted
    if draining:
        sentence = _sentence(sorted(draining), "draining", is_all=hosts == draining)
        reasons.append(f"{sentence}: wait until its supervisor has restarted, or start another one")
    if blacklisted:
        sentence = _sentence(sorted(blacklisted), "blacklisted", is_all=is_one_reason)
        reasons.append(f"{sentence}: `storm-dagster blacklist remove HOST`")
    return "; ".join(reasons)


def isolation_warnings(view: ClusterView, name: str, isolation: Sequence[str]) -> tuple[str, ...]:
    """Sentences about hosts of ``isolation.scheduler.machines`` that have no effect.

    They are listed twice, or no supervisor is registered on them.
    """
    warnings: list[str] = []
    repeated = sorted(host for host, count in Counter(isolation).items() if count > 1)
    if repeated:
        names = f"{', '.join(repeated):.{_HOSTS_CHARS}}"
        warnings.append(
            f"topology {name!r}: isolation.scheduler.machines lists {names} more than once, which "
            "counts once: list each host once"
        )
    hosts = {info.host for info in view.supervisors.values()}
    unknown = sorted(set(isolation) - hosts)
    if unknown:
        names = f"{', '.join(unknown):.{_HOSTS_CHARS}}"
        effect = "" if set(isolation) & hosts else ", so the topology is placed on any host"
        warnings.append(
            f"topology {name!r}: no supervisor is registered on {names} of its "
            f"isolation.scheduler.machines{effect}: start one there, or correct the list"
        )
    return tuple(warnings)


def held_slots(view: ClusterView, placing: Collection[str]) -> str:
    """The topologies other than ``placing`` that hold the most slots, with their numbers."""
    counts = Counter[str]()
    for topology in view.topologies.values():
        if topology.id not in placing and topology.workers:
            counts[title_with_owner(topology)] += len(topology.workers)
    if not counts:
        return ""
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_HOLDERS_NAMED]
    named = ", ".join(f"{title} holds {count}" for title, count in largest)
    return f"of the slots in use {named}"


def slot_limits(
    view: ClusterView, topology: TopologyView, usable: UsableSlots, *, lacks_workers: bool
) -> str:
    """Limits that leave the topology fewer hosts or workers than the cluster has, in words.

    ``usable`` are the slots that it may use. ``lacks_workers``: it has fewer workers than it asked
    for. Empty without a limit.
    """
    limits: list[str] = []
    registered = {info.host for info in view.supervisors.values()}
    hosts = {supervisor.info.host for supervisor in usable.confined}
    reasons = _host_limits(view, topology, usable)
    if reasons and hosts != registered:
        verb = "leaves" if len(reasons) == 1 else "leave"
        word = "host" if len(registered) == 1 else "hosts"
        limits.append(f"{' and '.join(reasons)} {verb} {len(hosts)} of {len(registered)} {word}")
    kept = min(usable.reserve, len(usable.free))
    if lacks_workers and kept:
        word = "slot" if len(usable.free) == 1 else "slots"
        limits.append(f"jstorm.reserve.workers keeps {kept} of {len(usable.free)} {word} free")
    return "; ".join(limits)


def _host_limits(view: ClusterView, topology: TopologyView, usable: UsableSlots) -> list[str]:
    """The settings and states that take hosts from the topology."""
    reasons: list[str] = []
    candidates = {info.host for info in view.supervisors.values()}
    if len(usable.confined) < len(usable.supervisors):
        reasons.append("isolation.scheduler.machines")
        candidates &= set(topology.base.isolation)
    closed = hosts_closed_to(view, [topology.id])
    if candidates & closed.blacklisted:
        reasons.append("the blacklist")
    if candidates & closed.isolated.keys():
        reasons.append("the isolation of other topologies")
    offered = {supervisor.id for supervisor in usable.supervisors}
    for supervisor_id, info in view.supervisors.items():
        if info.host in closed or info.host not in candidates or supervisor_id in offered:
            continue
        reason = "the drain" if info.draining else "nimbus.rebalance.quiet.secs"
        if reason not in reasons:
            reasons.append(reason)
    return reasons


def title_with_owner(topology: TopologyView) -> str:
    """Name of the topology, and its owner if it has one."""
    title = f"topology {topology.base.name!r}"
    return f"{title} of user {topology.base.owner!r}" if topology.base.owner else title


def _sentence(hosts: Sequence[str], state: str, *, is_all: bool) -> str:
    """The sentence that the hosts are in that state; ``is_all``: these are all hosts."""
    names = f"{', '.join(hosts):.{_HOSTS_CHARS}}"
    if is_all:
        return f"every host is {state} ({names})"
    return f"{names} is {state}" if len(hosts) == 1 else f"{names} are {state}"
