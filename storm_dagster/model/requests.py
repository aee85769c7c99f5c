"""Requests to change topologies and the cluster: one model each.

The body of an HTTP request and its schema in ``/openapi.json``, the config of a Dagster job, and
the options of the command line are made of the fields of a model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

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

from storm_dagster.model.access_tokens import DEFAULT_LIFE_SECS, MAX_LIFE_SECS, TokenScope
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.healing_pause import DEFAULT_PAUSE_SECS, MAX_PAUSE_SECS

_R = TypeVar("_R", bound=BaseModel)
_MAX_SECS = 10 * 366 * 86400
"""Longest duration in a request: ten years."""


@dataclass(frozen=True)
class Flag:
    """Option of the command line for a field.

    A field without a flag is not an option there.
    """

    name: str
    metavar: str | None = None


def parse_workers(text: str | Iterable[str]) -> tuple[str, ...]:
    """Parse ``host:port, host:port`` into workers, in that order, each once.

    :class:`InvalidRequest` for anything else.
    """
    if not isinstance(text, str | list | tuple):
        raise InvalidRequest(f"{text!r:.40} names no workers: give HOST:PORT,HOST:PORT")
    workers: dict[str, None] = {}
    parts = text.split(",") if isinstance(text, str) else text
    for part in parts:
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
        workers[f"{host}:{int(port)}"] = None
    return tuple(workers)


class RequestModel(BaseModel):
    """Base of requests: no other fields, and exactly these types.

    A field that is null counts as left out.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        return {key: value for key, value in document.items() if value is not None}

    def fields(self) -> dict[str, Any]:
        """Fields that the request sets, apart from ``dry_run``."""
        return self.model_dump(mode="json", exclude={"dry_run"}, exclude_unset=True)


def bounds_of(field: FieldInfo) -> dict[str, Any]:
    """Bounds of a field: ``ge`` and ``le``, as far as it has them."""
    bounds: dict[str, Any] = {}
    for constraint in field.metadata:
        for name in ("ge", "le"):
            if hasattr(constraint, name):
                bounds[name] = getattr(constraint, name)
    return bounds


def parse_number(name: str, text: str, *, lowest: int = 0, highest: int) -> int:
    """Whole number of a parameter ``name`` of a request, of the digits 0 to 9.

    Raises :class:`InvalidRequest` for other text, and for a number that is not from ``lowest`` to
    ``highest``.
    """
    # More digits than those of the largest number are not read: a long text takes long.
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(highest))
    if not is_number or not lowest <= int(text) <= highest:
        raise InvalidRequest(
            f"{name} must be a whole number from {lowest} to {highest}, got {text!r:.40}"
        )
    return int(text)


def check_request(kind: type[_R], document: Mapping[str, Any], subject: str) -> _R:
    """Validate a document as a request of that type.

    :class:`InvalidRequest` names ``subject`` and the first field that is wrong.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field_path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            fields = ", ".join(sorted(kind.model_fields)) or "no fields"
            raise InvalidRequest(
                f"{subject} has no field {field_path!r:.40}: it has {fields}"
            ) from None
        raise InvalidRequest(
            f"{field_path!r:.80} of {subject}: {first['msg']}, got {first['input']!r:.40}"
        ) from None


class VerbRequest(RequestModel):
    """Request to change a topology; with ``dry_run`` the change is only described."""

    dry_run: bool = Field(default=False, description="Show the effect without changing anything.")


class KillRequest(VerbRequest):
    """Request to kill a topology."""

    wait_secs: Annotated[int | None, Flag("-w")] = Field(
        default=None,
        ge=0,
        le=_MAX_SECS,
        description=(
            "Seconds of silence before it, so that tuples finish. [default: message timeout]"
        ),
    )


class RebalanceRequest(KillRequest):
    """Request to rebalance a topology; fields that are left out change no setting."""

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
    """Request for the next batch of an upgrade.

    The first batch brings the new code. Workers have precedence over the component.
    """

    number: Annotated[int, Flag("-n")] = Field(
        default=0, ge=0, le=100_000, description="Number of workers, lowest host:port first."
    )
    component: Annotated[str | None, Flag("-p")] = Field(
        default=None, description="Workers of this component: all of them, or that number."
    )
    workers: Annotated[
        list[str],
        BeforeValidator(lambda workers: list(parse_workers(workers))),
        WithJsonSchema(
            {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}
        ),
        Flag("-w", "HOST:PORT,..."),
    ] = Field(default=[], description="Exactly these workers, as host:port.")


class AccessTokenRequest(RequestModel):
    """Record of a new access token."""

    id: str = Field(pattern="^[0-9a-f]{16}$")
    """Chosen by the client, so that a repetition records no second token."""
    scope: TokenScope
    user: str = Field(default="", max_length=128)
    life_secs: int = Field(default=DEFAULT_LIFE_SECS, ge=60, le=MAX_LIFE_SECS)


class PauseHealingRequest(RequestModel):
    """Pause of healing."""

    secs: int = Field(default=DEFAULT_PAUSE_SECS, ge=1, le=MAX_PAUSE_SECS)
    """Length, seconds."""


class BlacklistRequest(RequestModel):
    """Change of the blacklist: hosts."""

    add: list[str] = []
    remove: list[str] = []
