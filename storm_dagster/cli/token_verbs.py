"""Verb ``token``: access tokens for clients that cannot sign requests."""

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import click

from storm_dagster.cli.options import Invocation, verb, verb_group
from storm_dagster.cli.output import print_answer, print_line
from storm_dagster.client.http import NimbusClient
from storm_dagster.model.access_tokens import (
    MAX_LIFE_SECS,
    TOKEN_SCOPES,
    TokenScope,
    check_token_user,
)
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, StormDagsterError, Unavailable
from storm_dagster.security.access_tokens import make_token, new_token_id
from storm_dagster.security.settings import Security

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
"""Unit of a life -> its seconds."""
_PATH = "/v1/access-tokens"


def _parse_life(text: str) -> int:
    """Parse minutes, hours or days, such as ``30d``, into seconds; a year at most."""
    match = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise InvalidRequest(
            f"--expires {text!r:.40} is not a time: use a number of minutes, hours or days, such "
            "as 30d"
        )
    life_secs = int(match[1]) * _UNITS[match[2]]
    if life_secs > MAX_LIFE_SECS:
        raise InvalidRequest(
            f"--expires {text} is longer than {MAX_LIFE_SECS // 86_400} days: make a new token "
            "before this one ends"
        )
    return life_secs


@verb("create")
@click.option(
    "--scope",
    type=click.Choice(TOKEN_SCOPES),
    required=True,
    help="Operations that the token permits.",
)
@click.option(
    "--user",
    default="",
    metavar="NAME",
    help="User whom it belongs to: it permits no more than a certificate of that user.",
)
@click.option(
    "--expires",
    default="30d",
    show_default=True,
    help="Lifetime, such as 90m, 12h, 30d; at most 365d.",
)
def token_create(invocation: Invocation, scope: TokenScope, user: str, expires: str) -> None:
    """Make a token from the cluster's secret.

    It is for Authorization: Bearer, or the password of Basic. The leading nimbus records its user,
    scope and end, and never the token: one ends with its time, when it is revoked, or when the
    secret is changed. What is submitted with --user NAME belongs to NAME. A token of scope operate
    without a user submits topologies that have no owner.
    """
    life_secs = _parse_life(expires)
    check_token_user(user)
    secret = Security.of(invocation.conf).secret
    if secret is None:
        raise InvalidRequest(
            "this cluster has no secret, so that it checks no token: set storm.secret.file"
        )
    request = {"id": new_token_id(), "scope": scope, "user": user, "life_secs": life_secs}
    with invocation.nimbus() as nimbus:
        record = _record(nimbus, request)
    access_token = make_token(secret, scope, record["expires_secs"], record["id"], user)
    document = {
        "token": access_token,
        "id": record["id"],
        "scope": scope,
        "user": record["user"],
        "expires": record["expires_secs"],
    }
    print_line(invocation.json, document, access_token)


def _record(nimbus: NimbusClient, request: Mapping[str, Any]) -> dict[str, Any]:
    """Record of a new token at the leader; an error says that no token was made."""
    try:
        return nimbus.post(_PATH, request)
    except KeyNotFound as error:
        raise Unavailable(
            "no token was made: the leading nimbus is of a release that records none; upgrade "
            "every nimbus first"
        ) from error
    except StormDagsterError as error:
        raise type(error)(
            f"no token was made, since the leading nimbus must record it: {error.message}"
        ) from error


@verb("list")
def token_list(invocation: Invocation) -> None:
    """List the tokens that are recorded, the oldest first.

    Tokens of earlier releases, and those that the cluster derives for its own parts, are not.
    """
    with invocation.nimbus() as nimbus:
        document = nimbus.get(_PATH)
    columns = "id scope user expires made by"
    rows = [
        (
            row["id"],
            row["scope"],
            row["user"] or "-",
            _time_text(row["expires_secs"]),
            _time_text(row["made_secs"]),
            row["made_by"] or "-",
        )
        for row in document["tokens"]
    ]
    print_answer(invocation.json, document, columns, rows)


@verb("revoke")
@click.argument("token_id", metavar="ID")
def token_revoke(invocation: Invocation, token_id: str) -> None:
    """Revoke the token ID: within 10 s no daemon accepts it.

    `token list` shows the ids.
    """
    if not re.fullmatch(r"[0-9a-f]{1,64}", token_id):
        raise InvalidRequest(
            f"{token_id!r:.40} is not the id of a token: see `storm-dagster token list`"
        )
    with invocation.nimbus() as nimbus:
        nimbus.request("DELETE", f"{_PATH}/{token_id}")
    print_line(invocation.json, {"id": token_id, "revoked": True}, f"revoked {token_id}")


def _time_text(secs: int) -> str:
    return f"{datetime.fromtimestamp(secs, timezone.utc):%Y-%m-%d %H:%M} UTC"


token = verb_group(
    "token", "Tokens for clients that cannot sign.", token_create, token_list, token_revoke
)

COMMANDS: Mapping[str, click.Command] = {"token": token}
