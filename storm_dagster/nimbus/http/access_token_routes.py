"""Routes of access tokens, for administrators: their records, never the tokens."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel
from starlette.responses import Response

from storm_dagster.core.authorization import REQUEST_USER
from storm_dagster.http.documents import CHANGE_ERRORS, JsonMap
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.access_tokens import FORMER_LIFE_SECS
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.requests import AccessTokenRequest, check_request
from storm_dagster.model.token_records import AccessTokenRecord
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.live.access_tokens import create_token, revoke_token
from storm_dagster.security.settings import Security
from storm_dagster.zk.access_tokens import read_recorded_from, read_token_records

_audit = logging.getLogger("storm_dagster.audit")
TokenId = Annotated[str, Parameter("path", "id", "Id of the token")]


class AccessTokenDocument(BaseModel, extra="forbid"):
    """Record of an access token."""

    id: str
    scope: str
    user: str | None
    """User whom it belongs to; null without one."""
    expires_secs: int
    """End (epoch seconds)."""
    made_secs: int
    """Time of creation (epoch seconds)."""
    made_by: str


class AccessTokensDocument(BaseModel, extra="forbid"):
    """Access tokens that are recorded, the oldest first."""

    tokens: list[AccessTokenDocument]
    former_until_secs: int | None
    """End of tokens that earlier releases made (epoch seconds); null while no leader has recorded
    tokens.
    """


class AccessTokenRoutes:
    """Routes of the list of access tokens."""

    router: ClassVar = Router("access tokens")

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus

    @router.route(
        "GET",
        "/v1/access-tokens",
        summary="Access tokens that are recorded",
        responses={200: AccessTokensDocument},
        errors=(500, 503),
    )
    def records(self) -> dict[str, Any]:
        """Records in order of their time."""
        state = self._nimbus.cluster.state
        recorded_from_secs = read_recorded_from(state)
        former_until_secs = None
        if recorded_from_secs is not None:
            former_until_secs = recorded_from_secs + FORMER_LIFE_SECS
        records = read_token_records(state)
        return {"tokens": _rows(records), "former_until_secs": former_until_secs}

    @router.route(
        "POST",
        "/v1/access-tokens",
        summary="Record an access token",
        body=AccessTokenRequest,
        body_required=True,
        responses={201: AccessTokenDocument},
        errors=CHANGE_ERRORS,
    )
    def create(self, document: JsonMap) -> dict[str, Any]:
        """Record a token, which the client makes of the secret afterwards."""
        epoch = self._nimbus.status.require()
        request = check_request(AccessTokenRequest, document, "an access token")
        if Security.of(self._nimbus.conf).secret is None:
            raise InvalidRequest(
                "this cluster has no secret, so that it checks no token: set storm.secret.file"
            )
        record = create_token(
            self._nimbus.operations(epoch),
            request.id,
            scope=request.scope,
            user=request.user,
            life_secs=request.life_secs,
            made_by=REQUEST_USER.get(),
        )
        self._nimbus.access_tokens.read_now()
        _audit.info(
            "user %r recorded token %s: scope %s, %s",
            record.made_by,
            request.id,
            record.scope,
            f"user {record.user!r}" if record.user else "no user",
        )
        return _row(request.id, record)

    @router.route(
        "DELETE",
        "/v1/access-tokens/{id}",
        summary="Revoke an access token",
        responses={204: None},
        errors=CHANGE_ERRORS,
    )
    def revoke(self, token_id: TokenId) -> Response:
        """Revoke a token: within 10 s it counts nowhere."""
        epoch = self._nimbus.status.require()
        revoke_token(self._nimbus.operations(epoch), token_id)
        self._nimbus.access_tokens.read_now()
        return Response(status_code=204)


def _rows(records: Mapping[str, AccessTokenRecord]) -> list[dict[str, Any]]:
    """Documents of the records, the oldest first."""
    rows = [_row(token_id, record) for token_id, record in records.items()]
    return sorted(rows, key=lambda row: (row["made_secs"], row["id"]))


def _row(token_id: str, record: AccessTokenRecord) -> dict[str, Any]:
    return {
        "id": token_id,
        "scope": record.scope,
        "user": record.user or None,
        "expires_secs": record.expires_secs,
        "made_secs": record.made_secs,
        "made_by": record.made_by,
    }
