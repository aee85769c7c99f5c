"""The what-if scheduling document of ``storm-dagster plan``, checked and typed."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.slot import Slot

Port = Annotated[int, Field(ge=1, le=65535)]
TaskId = Annotated[int, Field(ge=1, le=2_147_483_647)]
Text = Annotated[str, Field(min_length=1, max_length=255)]


class _Part(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)


class PlanSupervisor(_Part):
    """A live supervisor; ``used`` are ports that topologies outside of the document hold."""

    id: Text
    host: Text | None = None
    ports: list[Port]
    used: list[Port] = []
    rack: str | None = None
    cpu: Annotated[int, Field(ge=0)] = 0
    memory_mb: Annotated[int, Field(ge=0)] = 0


class PlanComponent(_Part):
    """A spout or bolt: how many executors, and for bolts what it subscribes to."""

    parallelism: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    inputs: list[Text] = []
    conf: dict[str, Any] = {}


class PlanOldWorker(_Part):
    """A worker of the present assignment."""

    node: Text
    host: Text | None = None
    port: Port
    tasks: list[TaskId]
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    cpu: Annotated[int, Field(ge=0)] = 0

    @property
    def slot(self) -> Slot:
        """Its slot."""
        return Slot(self.node, self.port)


class PlanTopology(_Part):
    """A topology and the event to plan."""

    name: str
    conf: dict[str, Any] = {}
    spouts: dict[str, PlanComponent] = {}
    bolts: dict[str, PlanComponent] = {}
    event: Literal["new", "monitor", "rebalance"] = "new"
    reassign: bool = False
    old: list[PlanOldWorker] = []
    dead: list[TaskId] = []
    unstopped: list[TaskId] = []
    tasks: dict[str, list[TaskId]] = {}


class PlanDocument(_Part):
    """A cluster and the topologies to place on it."""

    conf: dict[str, Any] = {}
    supervisors: list[PlanSupervisor] = []
    topologies: list[PlanTopology]


Fault = tuple[str, str]
"""(place in the document, what is wrong there)."""


def decode_plan(value: Any, source: str) -> PlanDocument:
    """The document in a parsed YAML or JSON value.

    :class:`InvalidRequest` names the place of the first thing that is wrong, like
    ``supervisors[2].ports``.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"{source}: a plan is a map with conf, supervisors and topologies")
    try:
        document = PlanDocument.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        text = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = sorted(_part_of(first["loc"]).model_fields)
            text = f"unknown key: use one of {', '.join(known)}"
        raise InvalidRequest(f"{source}: {place(*first['loc'])}: {text}") from None
    for where, what in _faults(document):
        raise InvalidRequest(f"{source}: {where}: {what}")
    return document


def _part_of(path: Sequence[str | int]) -> type[_Part]:
    """The part whose key ``path`` ends with."""
    if len(path) < 4:
        return {"supervisors": PlanSupervisor, "topologies": PlanTopology}.get(
            str(path[0]), PlanDocument
        )
    return PlanOldWorker if path[2] == "old" else PlanComponent


def place(*path: str | int) -> str:
    """A path into the document as people write it: ``topologies[0].bolts.split.inputs[1]``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".") or "the document"


def _faults(document: PlanDocument) -> Iterator[Fault]:
    """Faults that concern several parts."""
    if not document.supervisors:
        yield "supervisors", "there is none, so nothing can be placed: give at least one"
    if not document.topologies:
        yield "topologies", "there is none: give at least one"
    yield from _supervisor_faults(document.supervisors)
    yield from _repeated(
        (
            (topology.name, place("topologies", index, "name"))
            for index, topology in enumerate(document.topologies)
        ),
        "topology {} is listed twice",
    )
    for index, topology in enumerate(document.topologies):
        for where, what in _topology_faults(topology):
            yield f"{place('topologies', index)}.{where}", what
    live = (
        (old.slot.key, place("topologies", index, "old", number))
        for index, topology in enumerate(document.topologies)
        if topology.event != "new"
        for number, old in enumerate(topology.old)
    )
    yield from _repeated(live, "slot {} is held by two topologies")


def _supervisor_faults(supervisors: Sequence[PlanSupervisor]) -> Iterator[Fault]:
    ids = ((node.id, place("supervisors", index, "id")) for index, node in enumerate(supervisors))
    yield from _repeated(ids, "supervisor {} is listed twice")
    owner: dict[tuple[str, int], str] = {}
    for index, node in enumerate(supervisors):
        host = node.host or node.id
        for port in node.ports:
            other = owner.setdefault((host, port), node.id)
            if other != node.id:
                yield (
                    place("supervisors", index, "ports"),
                    f"port {port} is a port of supervisor {other!r} too, on the same host {host!r}: "
                    "give each supervisor of a host ports of its own",
                )
        for key, ports in (("ports", node.ports), ("used", node.used)):
            yield from _repeated(
                ((port, place("supervisors", index, key)) for port in ports),
                "port {} is listed twice",
            )
        if len(node.used) > len(node.ports):
            text = f"{len(node.used)} ports are used, the supervisor has {len(node.ports)}"
            yield place("supervisors", index, "used"), text
        for number, port in enumerate(node.used):
            if port not in node.ports:
                yield (
                    place("supervisors", index, "used", number),
                    f"port {port} is none of the supervisor's ports",
                )


def _topology_faults(topology: PlanTopology) -> Iterator[Fault]:
    known = {*topology.spouts, *topology.bolts}
    for kind, parts in (("spouts", topology.spouts), ("bolts", topology.bolts)):
        for component, part in parts.items():
            for number, source in enumerate(part.inputs):
                if kind == "spouts":
                    yield place(kind, component, "inputs"), "a spout has no inputs: make it a bolt"
                elif source not in known:
                    near = difflib.get_close_matches(source, known, n=1, cutoff=0.6)
                    hint = (
                        f"did you mean {near[0]!r}?"
                        if near
                        else f"there are {', '.join(sorted(known))}"
                    )
                    yield (
                        place(kind, component, "inputs", number),
                        f"component {source!r} does not exist: {hint}",
                    )
    if both := sorted(topology.spouts.keys() & topology.bolts.keys()):
        yield place("bolts", both[0]), "a spout has the same id: rename one of them"
    if not any(part.parallelism for part in (*topology.spouts.values(), *topology.bolts.values())):
        yield "spouts", "the topology has no task: give a component a parallelism of at least 1"
    slots = ((old.slot.key, place("old", number)) for number, old in enumerate(topology.old))
    yield from _repeated(slots, "slot {} is listed twice")
    held = (
        (task, place("old", number, "tasks"))
        for number, old in enumerate(topology.old)
        for task in old.tasks
    )
    yield from _repeated(held, "task {} is listed twice")
    ids = (
        (task, place("tasks", component))
        for component, given in topology.tasks.items()
        for task in given
    )
    yield from _repeated(ids, "id {} is given twice")


def _repeated(items: Iterable[tuple[str | int, str]], message: str) -> Iterator[Fault]:
    seen: set[str | int] = set()
    for value, where in items:
        if value in seen:
            yield where, message.format(repr(value))
        seen.add(value)
