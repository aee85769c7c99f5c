"""Reasons, in words, for hosts and slots that a topology cannot have."""

from collections import Counter
from collections.abc import Collection, Sequence

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
    own_hosts = set(isolation)
    isolating: list[tuple[str, str]] = []
    hosts = {info.host for info in view.supervisors.values()}
    for topology in view.topologies.values():
        if topology.id in placing:
            own_hosts.update(topology.base.isolation)
        else:
            isolating += [(host, title_with_owner(topology)) for host in topology.base.isolation]
    blacklisted = hosts & view.blacklist
    closed = {
        (host, title)
        for host, title in isolating
        if host in hosts and host not in own_hosts and host not in blacklisted
    }
    hosts_of = multimap((title, host) for host, title in sorted(closed))
    is_all = hosts == blacklisted | {host for host, _ in closed}
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
