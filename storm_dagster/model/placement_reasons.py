"""Reasons, in words, for the placement of tasks and workers and for refusals.

Over Spark a reason travels as its number, so that a hundred thousand tasks do not carry a hundred
thousand sentences.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

MASTER_ALONE_FROM = 10
"""Number of workers from which on the topology master gets its own worker by default."""

_SUPERVISORS_NAMED = 10
"""Number of supervisors that a refusal names."""


class Reason(IntEnum):
    """Reason for a task's worker, or (``SLOT_*``) for a worker's slot."""

    text: str

    def __new__(cls, number: int, text: str) -> "Reason":
        reason = int.__new__(cls, number)
        reason._value_ = number
        reason.text = text
        return reason

    ONLY = 0, "the only worker that could still take it"
    COMPONENT_WORKER = 1, "the worker had the fewest tasks of its component"
    COMPONENT_SUPERVISOR = 2, "the supervisor had the fewest tasks of its component"
    TOTAL_WORKER = 3, "the worker had the fewest tasks"
    TOTAL_SUPERVISOR = 4, "the supervisor had the fewest tasks"
    INPUT_WORKER = 5, "the worker had the most tasks that it exchanges tuples with"
    INPUT_SUPERVISOR = 6, "the supervisor had the most tasks that it exchanges tuples with"
    FIRST = 7, "the first of equally good workers"
    MASTER = 8, "the topology master has a worker of its own"
    USER = 9, "use.userdefine.assignment asks for it"
    OLD = 10, "use.old.assignment keeps it with its former companions"
    KEPT = 11, "its worker is alive and was left alone"
    UNSTOPPED = 12, "its worker still beats although its supervisor is gone"
    STAYS = 13, "it stays where it was: moving it would not improve the balance"
    DEALT = 14, "dealt round robin over the slots of the even strategy"
    LOCAL = 15, "local mode has one worker"
    SLOT_USER = 16, "use.userdefine.assignment asks for this host"
    SLOT_OLD = 17, "use.old.assignment asks for its former slot"
    SLOT_KEPT = 18, "the worker is alive and was left alone"
    SLOT_UNSTOPPED = 19, "the worker still beats although its supervisor is gone"
    SLOT_REUSED = 20, "the topology had this slot and keeps it"
    SLOT_ONLY = 21, "the only supervisor with a free port"
    SLOT_MOST_FREE = 22, "the supervisor had the most free ports"
    SLOT_FEWEST_USED = 23, "of the supervisors with the most free ports it had the fewest used"
    SLOT_LOWEST_ID = 24, "of equally loaded supervisors it has the lowest id"
    SLOT_DIFFER = 25, "task.on.differ.node needs another supervisor: the least loaded of those"
    SLOT_INTERLEAVED = 26, "its turn when free slots are dealt host by host"
    SLOT_LOCAL = 27, "the first free port of the only supervisor"


REASONS = {reason.text: reason for reason in Reason}
"""Sentence -> reason."""


def slot_reason_text(reason: int, against: str) -> str:
    """The sentence for a slot; ``against`` is the comparison of :func:`slot_rival`, or empty."""
    text = Reason(reason).text
    return f"{text}: {against}" if against else text


def slot_rival(reason: "Reason", load: tuple[int, int, str], rival: tuple[int, int, str]) -> str:
    """Comparison of the least loaded supervisor with the next one: ``3, next is s2 with 2``.

    Each is (minus free ports, used ports, id).
    """
    minus_free, used, _ = load
    rival_minus_free, rival_used, rival_id = rival
    if reason is Reason.SLOT_MOST_FREE:
        return f"{-minus_free}, next is {rival_id} with {-rival_minus_free}"
    if reason is Reason.SLOT_FEWEST_USED:
        return f"{used}, next is {rival_id} with {rival_used}"
    return f"next is {rival_id}"


class Refusal(NamedTuple):
    """Reason why a topology cannot be placed."""

    error_type: str
    """Name of the error class of ``model.errors``."""
    message: str
    """Thing, reason and remedy."""
    brief: str
    """The same for each of its tasks, without numbers."""


# Kind -> refusal whose message has places for the values of :func:`refusal`.
_REFUSALS = {
    "no supervisor": Refusal(
        "Unavailable",
        "topology {name!r} cannot be placed, no supervisor is alive: start one",
        "no supervisor is alive",
    ),
    "differ node": Refusal(
        "Unavailable",
        "topology {name!r} wants {needed} tasks of component {component!r} on different "
        "supervisors, its workers "
        "are on {supervisors} that may take one: raise topology.workers, add a supervisor, "
        "rebalance with "
        "reassign, or turn task.on.differ.node off",
        "task.on.differ.node finds too few supervisors",
    ),
    "too many requests": Refusal(
        "InvalidRequest",
        "topology {name!r} places {workers}, but use.userdefine.assignment asks for {requested} "
        "and "
        "{kept} would be kept beside: raise topology.workers, ask for fewer workers, or "
        "place all again (rebalance with reassign, or without use.old.assignment)",
        "more workers are asked for than its topology has",
    ),
    "even": Refusal(
        "InvalidRequest",
        "topology {name!r} uses the even strategy, which knows no {keys}: "
        "remove that, or set topology.scheduler.strategy=balanced",
        "the even strategy cannot do what the conf asks for",
    ),
    "local": Refusal(
        "InvalidRequest",
        "topology {name!r} uses the local strategy, which needs exactly one supervisor, there "
        "are {supervisors}: "
        "set topology.scheduler.strategy=balanced or leave one supervisor",
        "the local strategy needs exactly one supervisor",
    ),
}


def refusal(kind: str, name: str, **values: object) -> Refusal:
    """The refusal of that kind, with the values in its message."""
    template = _REFUSALS[kind]
    return template._replace(message=template.message.format(name=name, **values))


def short_of_slots_refusal(
    name: str,
    needed: int,
    free: Iterable[tuple[str, int]],
    *,
    reserve: int,
    workers: int | None,
    isolated: bool,
) -> Refusal:
    """Refusal for a topology that needs more slots than there are.

    ``free`` lists (supervisor id, free ports) of the supervisors that it may use; ``workers`` is
    the ``topology.workers`` with which it would fit, ``None`` if there is none. ``reserve`` is the
    number of slots that must stay free, ``isolated`` true if only some hosts are free for it.
    """
    # Supervisors without a free port last, since not all are named.
    pairs = sorted(free, key=lambda pair: (pair[1] == 0, pair[0]))
    total = sum(count for _, count in pairs)
    supervisors = ", ".join(f"{node}: {count}" for node, count in pairs[:_SUPERVISORS_NAMED])
    if len(pairs) > _SUPERVISORS_NAMED:
        supervisors += f" and {len(pairs) - _SUPERVISORS_NAMED} more supervisors"
    slots = "1 slot" if needed == 1 else f"{needed} slots"
    free_slots = f"{total} is free" if total == 1 else f"{total} are free"
    remedy = "add a supervisor"
    if isolated:
        free_slots += " on its isolation.scheduler.machines"
        remedy += " there"
    free_slots += f" ({supervisors})"
    if reserve:
        free_slots += f" and {reserve} of them must stay free"
        remedy += ", lower jstorm.reserve.workers"
    if workers is not None and workers >= 1:
        remedy += f" or set topology.workers={workers}"
    message = f"topology {name!r} needs {slots}, {free_slots}: {remedy}"
    return Refusal("Unavailable", message, "its topology needs more slots than are free")


def too_many_requests_refusal(name: str, requested: int, old: int, count: int) -> Refusal:
    """Refusal for user-defined workers that do not fit beside old workers."""
    return refusal(
        "too many requests",
        name,
        workers=_counted(count, "worker"),
        requested=requested,
        kept=_counted(old, "old worker"),
    )


def dropped_requests(key: str, requested: int, count: int) -> str:
    """Warning for more requested workers than workers to place.

    All of the requested workers are ignored.
    """
    return (
        f"{key} asks for {_counted(requested, 'worker')}, {count} can be had: none of them is"
        " followed; raise topology.workers or ask for fewer"
    )


def ignored_requests(strategy: str, keys: Iterable[str]) -> str:
    """Warning for conf keys that a strategy ignores."""
    return f"the {strategy} strategy knows no {', no '.join(keys)}: ignored"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
