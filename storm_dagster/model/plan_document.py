"""The what-if scheduling document of ``storm-dagster plan`` (design 6.2), checked and typed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from storm_dagster.model.errors import InvalidRequest

__all__ = ["PlanComponent", "PlanDocument", "PlanOldWorker", "PlanSupervisor", "PlanTopology", "decode_plan"]

Port = Annotated[int, Field(ge=1, le=65535)]
TaskId = Annotated[int, Field(ge=1, le=2_147_483_647)]
Text = Annotated[str, Field(min_length=1, max_length=255)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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

    @model_validator(mode="after")
    def _consistent(self) -> PlanTopology:
        _once((f"{old.node}:{old.port}" for old in self.old), "old lists slot {} twice")
        _once((task for old in self.old for task in old.tasks), "old lists task {} twice")
        _once((task for ids in self.tasks.values() for task in ids), "tasks gives id {} twice")
        return self


class PlanDocument(_Part):
    """A cluster and the topologies to place on it."""

    conf: dict[str, Any] = {}
    supervisors: list[PlanSupervisor] = []
    topologies: list[PlanTopology]

    @model_validator(mode="after")
    def _consistent(self) -> PlanDocument:
        _once((node.id for node in self.supervisors), "supervisor {} is listed twice")
        _once((topology.name for topology in self.topologies), "topology {} is listed twice")
        live = (
            f"{old.node}:{old.port}"
            for topology in self.topologies
            if topology.event != "new"
            for old in topology.old
        )
        _once(live, "slot {} is held by two topologies")
        return self


def _once(values: Iterable[Any], message: str) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise ValueError(message.format(repr(value) if isinstance(value, str) else value))


def decode_plan(value: Any, source: str) -> PlanDocument:
    """The document in a parsed YAML or JSON value; :class:`InvalidRequest` names the first thing that is wrong."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{source}: a plan is a map with conf, supervisors and topologies")
    try:
        return PlanDocument.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        text = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{source}: {where + ': ' if where else ''}{text}") from None
