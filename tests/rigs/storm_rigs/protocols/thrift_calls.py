"""Calls of Thrift methods as clients send them."""

from __future__ import annotations

from typing import Any

from storm_dagster.nimbus.thrift.idl import encode_message, load_idl

_CALL = 1


def encode_call(name: str, seqid: int, /, **arguments: Any) -> bytes:
    """A call with its arguments."""
    payload = getattr(load_idl().Nimbus, f"{name}_args")()
    for key, value in arguments.items():
        setattr(payload, key, value)
    return encode_message(name, _CALL, seqid, payload)
