"""Records of access tokens in ZooKeeper."""

from pydantic import Field

from storm_dagster.model.records import Record


class AccessTokens(Record):
    """``/access_tokens``, the parent of the records of access tokens."""

    recorded_from_secs: int
    """Start of the first leader that records tokens (epoch seconds), by its clock."""


class AccessTokenRecord(Record):
    """One access token that counts. The token itself is in no record."""

    user: str = Field(default="", max_length=128)
    """User whom the token belongs to; empty without one."""
    scope: str = Field(max_length=32)
    expires_secs: int
    """End (epoch seconds)."""
    made_secs: int
    """Time of its record (epoch seconds), by the leader's clock."""
    made_by: str = Field(default="", max_length=200)
    """User who asked for it."""
