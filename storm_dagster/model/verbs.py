"""The verbs that change topologies: one request model and one row of a table for each.

Bodies of HTTP and ``/openapi.json``, the configs and jobs of Dagster, options and help of the
command line, the functions of the client and the table of ``docs/http.md`` are made of these. The
operation of a verb has its name, in :mod:`storm_dagster.operations.live.lifecycle`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.tables import load_table

_R = TypeVar("_R", bound=BaseModel)
_MOST_SECS = 10 * 366 * 86400


@dataclass(frozen=True)
class Flag:
    """How the command line names a field; a field without one is no option there."""

    name: str
    metavar: str | None = None


def parse_workers(text: str | Iterable[str]) -> tuple[str, ...]:
    """``host:port, host:port`` in the order given, each once; :class:`InvalidRequest` for anything
    else.
    """
    if not isinstance(text, str | list | tuple):
        raise InvalidRequest(f"{text!r:.40} names no workers: give HOST:PORT,HOST:PORT")
    found: dict[str, None] = {}
    for part in text.split(",") if isinstance(text, str) else text:
        if not isinstance(part, str):
            raise InvalidRequest(f"{part!r:.40} is not a worker: name workers as HOST:PORT")
        word = part.strip()
        if not word:
            continue
        host, _, port = word.rpartition(":")
        if not host or not port.isascii() or not port.isdigit():
            raise InvalidRequest(
                f"{word!r:.80} is not a worker: name workers as HOST:PORT,HOST:PORT"
            )
        found[f"{host}:{int(port)}"] = None
    return tuple(found)


class RequestModel(BaseModel):
    """Fields of a request: no others, of exactly these types. A field that is null counts as left
    out.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        return (
            {key: value for key, value in given.items() if value is not None}
            if isinstance(given, dict)
            else given
        )

    def fields(self) -> dict[str, Any]:
        """What was asked for apart from ``dry_run``."""
        return self.model_dump(mode="json", exclude={"dry_run"}, exclude_unset=True)


def bounds_of(field: FieldInfo) -> dict[str, Any]:
    """The bounds of a field, ``ge`` and ``le``."""
    return {
        name: getattr(each, name)
        for each in field.metadata
        for name in ("ge", "le")
        if hasattr(each, name)
    }


def check_request(kind: type[_R], document: Mapping[str, Any], what: str) -> _R:
    """The document as its type; :class:`InvalidRequest` names the first thing that is wrong in
    it.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            known = ", ".join(sorted(kind.model_fields)) or "no fields"
            raise InvalidRequest(f"{what} has no field {where!r:.40}: it has {known}") from None
        raise InvalidRequest(
            f"{where!r:.80} of {what}: {first['msg']}, got {first['input']!r:.40}"
        ) from None


class VerbRequest(RequestModel):
    """Request to change a topology; with ``dry_run`` the change is only described."""

    dry_run: bool = Field(default=False, description="Show the effect without changing anything.")


class KillRequest(VerbRequest):
    """Request to kill a topology."""

    wait_secs: Annotated[int | None, Flag("-w")] = Field(
        default=None,
        ge=0,
        le=_MOST_SECS,
        description="Seconds of silence before it, so that tuples finish. [default: message timeout]",
    )


class RebalanceRequest(KillRequest):
    """Request to rebalance a topology; what is left out stays as it is."""

    workers: Annotated[int | None, Flag("-n")] = Field(
        default=None, ge=1, le=100_000, description="New number of workers."
    )
    executors: Annotated[dict[str, int], Flag("-e", "COMPONENT=N")] = Field(
        default={}, description="New parallelism of components, for example {count: 4}."
    )
    reassign: Annotated[bool, Flag("--reassign")] = Field(
        default=False, description="Place all tasks again instead of moving the fewest."
    )


class CodeRequest(RequestModel):
    """Request that may bring code."""

    handle: str | None = Field(
        default=None, description="Upload that holds the code. Set by clients."
    )
    token: Annotated[str | None, Flag("--token")] = Field(
        default=None, description="Client token. Calls with the same token take effect once."
    )
    allow_degraded: Annotated[bool, Flag("--allow-degraded")] = Field(
        default=False, description="Continue although too few nimbuses hold the code."
    )


class SubmitRequest(CodeRequest):
    """Request to submit a topology."""

    name: str = Field(description="Name of the topology.")
    inactive: Annotated[bool, Flag("--inactive")] = Field(
        default=False, description="Place the topology without starting its spouts."
    )


class UpdateRequest(CodeRequest, VerbRequest):
    """Request to replace a topology's code."""


class GrayUpgradeRequest(CodeRequest, VerbRequest):
    """Request for the next batch of an upgrade, with new code for the first. Workers count before
    the component.
    """

    number: Annotated[int, Flag("-n")] = Field(
        default=0, ge=0, le=100_000, description="Number of workers, lowest host:port first."
    )
    component: Annotated[str | None, Flag("-p")] = Field(
        default=None, description="Workers of this component: all of them, or that number."
    )
    workers: Annotated[
        list[str],
        BeforeValidator(lambda given: list(parse_workers(given))),
        WithJsonSchema(
            {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}
        ),
        Flag("-w", "HOST:PORT,..."),
    ] = Field(default=[], description="Exactly these workers, as host:port.")


class BlacklistRequest(RequestModel):
    """Change of the blacklist: hosts."""

    add: list[str] = []
    remove: list[str] = []


@dataclass(frozen=True)
class Verb:
    """One verb that changes a topology."""

    name: str
    summary: str
    """Its effect, first sentence first: help, description of the job, documentation."""
    request: type[VerbRequest] = VerbRequest
    executed_by: Literal["leader", "run"] = "run"
    """``leader``: one transaction of the leader, which Dagster is notified of. ``run``: a Dagster
    run.
    """
    until: tuple[str | None, ...] = ()
    """After its run, who asked waits for one of these statuses; ``None``: the topology is gone."""
    tasks: bool = False
    """Whether he then waits until all tasks run."""
    batches: bool = False
    """Whether its run watches workers change their code, for a time that its config limits."""

    @property
    def job(self) -> str:
        """Name of its Dagster job."""
        return f"{self.name.replace('-', '_')}_topology"

    @property
    def brings_code(self) -> bool:
        """Whether it takes a TARGET, which clients upload."""
        return issubclass(self.request, CodeRequest)


def _verbs() -> Iterator[tuple[str, Verb]]:
    for name, row in load_table(__name__, "verbs").items():
        row["request"] = globals()[row.get("request", "VerbRequest")]
        row["until"] = tuple(row.get("until", ()))
        yield name, Verb(name, **row)


VERBS: Mapping[str, Verb] = dict(_verbs())
"""Name -> verb, of ``verbs.yaml``."""
