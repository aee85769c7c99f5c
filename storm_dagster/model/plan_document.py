"""The document of ``storm-dagster plan``, checked and typed."""

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
    """A live supervisor.

    ``used`` are ports that topologies outside the document hold.
    """

    id: Text
    host: Text | None = None
    ports: list[Port]
    used: list[Port] = []
    rack: str | None = None
    cpu: Annotated[int, Field(ge=0)] = 0
    memory_mb: Annotated[int, Field(ge=0)] = 0


class PlanComponent(_Part):
    """A spout or bolt: its number of executors, and the inputs of a bolt."""

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
    """Tasks that are dead."""
    unstopped: list[TaskId] = []
    """Tasks of workers that still beat although their supervisor is gone."""
    tasks: dict[str, list[TaskId]] = {}
    """Component -> its task ids."""


class PlanDocument(_Part):
    """A cluster and the topologies to place on it."""

    conf: dict[str, Any] = {}
    supervisors: list[PlanSupervisor] = []
    topologies: list[PlanTopology]


Fault = tuple[str, str]
"""(place in the document, problem)."""


def decode_plan(value: Any, source: str) -> PlanDocument:
    """The document of a parsed YAML or JSON value.

    :class:`InvalidRequest` names the place of the first fault, such as ``supervisors[2].ports``.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"{source}: a plan is a map with conf, supervisors and topologies")
    try:
        document = PlanDocument.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        text = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            keys = sorted(_part_of(first["loc"]).model_fields)
            text = f"unknown key: use one of {', '.join(keys)}"
        raise InvalidRequest(f"{source}: {place(*first['loc'])}: {text}") from None
    first_fault = next(_faults(document), None)
    if first_fault is not None:
        fault_place, problem = first_fault
        raise InvalidRequest(f"{source}: {fault_place}: {problem}")
    return document


def _part_of(path: Sequence[str | int]) -> type[_Part]:
    """The class of the part whose key ``path`` ends with."""
    if len(path) >= 4:
        return PlanOldWorker if path[2] == "old" else PlanComponent
    if path[0] == "supervisors":
        return PlanSupervisor
    if path[0] == "topologies":
        return PlanTopology
    return PlanDocument


def place(*path: str | int) -> str:
    """A path into the document for people, such as ``topologies[0].name``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".") or "the document"


def _faults(document: PlanDocument) -> Iterator[Fault]:
    """Faults that concern several parts."""
    if not document.supervisors:
        yield "supervisors", "there is none to place tasks on: give at least one"
    if not document.topologies:
        yield "topologies", "there is none: give at least one"
    yield from _supervisor_faults(document.supervisors)
    names = [
        (topology.name, place("topologies", index, "name"))
        for index, topology in enumerate(document.topologies)
    ]
    yield from _repeated(names, "topology {} is listed twice")
    for index, topology in enumerate(document.topologies):
        for topology_place, problem in _topology_faults(topology):
            yield f"{place('topologies', index)}.{topology_place}", problem
    slots: list[tuple[str, str]] = []
    for index, topology in enumerate(document.topologies):
        if topology.event == "new":
            # Its old workers are a backup, which holds no slots.
            continue
        for number, worker in enumerate(topology.old):
            slots.append((worker.slot.key, place("topologies", index, "old", number)))
    yield from _repeated(slots, "slot {} is held by two topologies")


def _supervisor_faults(supervisors: Sequence[PlanSupervisor]) -> Iterator[Fault]:
    """Repeated ids and ports, ports of two supervisors of a host, used ports that do not exist."""
    ids = ((node.id, place("supervisors", index, "id")) for index, node in enumerate(supervisors))
    yield from _repeated(ids, "supervisor {} is listed twice")
    owner: dict[tuple[str, int], str] = {}
    for index, node in enumerate(supervisors):
        host = node.host or node.id
        for port in node.ports:
            owner_id = owner.setdefault((host, port), node.id)
            if owner_id != node.id:
                yield (
                    place("supervisors", index, "ports"),
                    f"port {port} is a port of supervisor {owner_id!r} too, on the same host"
                    f" {host!r}: give each supervisor of a host ports of its own",
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


def _input_faults(topology: PlanTopology) -> Iterator[Fault]:
    """Faults of inputs: those of spouts, and those that name no component."""
    for component, part in topology.spouts.items():
        for _ in part.inputs:
            yield place("spouts", component, "inputs"), "a spout has no inputs: make it a bolt"
    components = {*topology.spouts, *topology.bolts}
    for component, part in topology.bolts.items():
        for number, source in enumerate(part.inputs):
            if source in components:
                continue
            nearest = difflib.get_close_matches(source, components, n=1, cutoff=0.6)
            if nearest:
                hint = f"did you mean {nearest[0]!r}?"
            else:
                hint = f"there are {', '.join(sorted(components))}"
            text = f"component {source!r} does not exist: {hint}"
            yield place("bolts", component, "inputs", number), text


def _topology_faults(topology: PlanTopology) -> Iterator[Fault]:
    """Faults inside of a topology; their places are relative to it."""
    yield from _input_faults(topology)
    shared_ids = sorted(topology.spouts.keys() & topology.bolts.keys())
    if shared_ids:
        yield place("bolts", shared_ids[0]), "a spout has the same id: rename one of them"
    if not any(part.parallelism for part in (*topology.spouts.values(), *topology.bolts.values())):
        yield "spouts", "the topology has no task: give a component a parallelism of at least 1"
    slots: list[tuple[str, str]] = []
    tasks: list[tuple[int, str]] = []
    for number, worker in enumerate(topology.old):
        slots.append((worker.slot.key, place("old", number)))
        tasks += [(task, place("old", number, "tasks")) for task in worker.tasks]
    yield from _repeated(slots, "slot {} is listed twice")
    yield from _repeated(tasks, "task {} is listed twice")
    ids: list[tuple[int, str]] = []
    for component, task_ids in topology.tasks.items():
        ids += [(task, place("tasks", component)) for task in task_ids]
    yield from _repeated(ids, "id {} is given twice")


def _repeated(items: Iterable[tuple[str | int, str]], message: str) -> Iterator[Fault]:
    """Fault for each value, of (value, place), that has an earlier place."""
    values: set[str | int] = set()
    for value, value_place in items:
        if value in values:
            yield value_place, message.format(repr(value))
        values.add(value)
