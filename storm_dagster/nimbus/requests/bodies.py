"""Bodies of requests that change something: checked by the types from which ``/openapi.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from storm_dagster.core.upgrade.selection import parse_workers
from storm_dagster.model.errors import InvalidRequest

_B = TypeVar("_B", bound=BaseModel)
_WaitSecs = Annotated[int, Field(ge=0, le=10 * 366 * 86400)]


class Body(BaseModel):
    """A body that has no other fields, and whose values are of exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


def check_body(kind: type[_B], document: Mapping[str, Any], what: str) -> _B:
    """The document as its type; :class:`InvalidRequest` names the first thing that is wrong in it."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            known = ", ".join(sorted(kind.model_fields)) or "no fields"
            raise InvalidRequest(f"{what} has no field {where!r:.40}: it has {known}") from None
        raise InvalidRequest(f"{where!r:.80} of {what}: {first['msg']}, got {first['input']!r:.40}") from None


class PlainChange(Body):
    """Change of a topology; with ``dry_run`` it is only described. A field that is null counts as left out."""

    dry_run: bool = False

    def fields(self) -> dict[str, Any]:
        """What was asked for apart from ``dry_run``."""
        return self.model_dump(mode="json", exclude={"dry_run"}, exclude_none=True)


class KillChange(PlainChange):
    """Kill of a topology."""

    wait_secs: _WaitSecs | None = None


class RebalanceChange(KillChange):
    """Rebalance of a topology; ``executors`` maps component ids to numbers."""

    workers: Annotated[int, Field(ge=1, le=100_000)] | None = None
    executors: dict[str, Annotated[int, Field(ge=0, le=10_000_000)]] | None = None
    reassign: bool | None = None


class UpdateChange(PlainChange):
    """New code for a topology: the handle of its upload."""

    handle: str | None = None
    token: str | None = None
    allow_degraded: bool | None = None


class GrayUpgradeChange(UpdateChange):
    """New code for some workers of a topology, ``HOST:PORT``, or the next of them; without a handle with earlier code."""

    number: Annotated[int, Field(ge=0, le=100_000)] | None = None
    component: str | None = None
    workers: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda given: parse_workers(() if given is None else given)),
        WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}),
    ] = ()


CHANGES: Mapping[str, type[PlainChange]] = {
    "activate": PlainChange,
    "deactivate": PlainChange,
    "kill": KillChange,
    "rebalance": RebalanceChange,
    "restart": PlainChange,
    "update": UpdateChange,
    "gray-upgrade": GrayUpgradeChange,
    "complete-upgrade": PlainChange,
    "rollback": PlainChange,
}
"""Verb -> body."""


class BlacklistChange(Body):
    """Change of the blacklist: hosts."""

    add: list[str] | None = None
    remove: list[str] | None = None
