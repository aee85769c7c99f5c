"""Claims of access tokens: what a token says of itself, and their bounds."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from storm_dagster.model.errors import InvalidRequest

TokenScope = Literal["metrics", "read", "read:tuples", "operate", "admin"]
"""``metrics``: only ``/metrics``; ``read``: topologies and the cluster, without tuples;
``read:tuples``: the same with dead letters and the content of state; ``operate``: submission and
changes of topologies, too; ``admin``: all requests.
"""
TOKEN_SCOPES: tuple[TokenScope, ...] = get_args(TokenScope)

TokenKind = Literal["recorded", "former", "derived"]
"""``recorded``: the cluster has a record of the token; ``former``: made by a release that recorded
none; ``derived``: made of the secret for a part of the cluster, such as Prometheus.
"""

DEFAULT_LIFE_SECS = 30 * 86_400
"""Life of a token unless its maker names another."""
MAX_LIFE_SECS = 365 * 86_400
"""Longest life of a token."""
FORMER_LIFE_SECS = 30 * 86_400
"""Time after the first leader that records tokens in which tokens of earlier releases count."""

TOKEN_ID = re.compile(r"[0-9a-f]{16}")
"""Form of the id of a recorded token."""
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}")
_UNOWNED_PREFIX = "token "
"""A user's name has no space, so that no user is taken for a token, nor a token for a user."""


@dataclass(frozen=True)
class TokenClaims:
    """Claims of a token whose code of authenticity is right."""

    kind: TokenKind
    scope: TokenScope
    expires_secs: int
    """End in epoch seconds."""
    id: str
    """Name in the list of tokens; of another kind than ``recorded`` any text."""
    user: str = ""
    """User whom the token belongs to; empty without one."""


def is_user_name(name: str) -> bool:
    """True if the name can be that of a user."""
    return _USER.fullmatch(name) is not None


def check_token_user(name: str) -> str:
    """The name of a user, empty for none; :class:`InvalidRequest` for another text."""
    if name and not is_user_name(name):
        raise InvalidRequest(
            f"{name!r:.80} is not the name of a user: use letters, digits and _.@-, as the common "
            "name of a certificate has"
        )
    return name


def scope_named(name: str) -> TokenScope | None:
    """The scope of that name; ``None`` for an unknown one."""
    for scope in TOKEN_SCOPES:
        if scope == name:
            return scope
    return None


def unowned_caller(token_id: str) -> str:
    """Name of the caller with a token that belongs to no user."""
    return f"{_UNOWNED_PREFIX}{token_id}"


def is_unowned_caller(name: str) -> bool:
    """True if the name is one of :func:`unowned_caller`."""
    return name.startswith(_UNOWNED_PREFIX)
