"""ZooKeeper's ``multiRead``, which kazoo lacks: the data of many nodes by one request, without watches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import EXCEPTIONS, NoNodeError
from kazoo.protocol.serialization import GetData, MultiHeader, int_struct, stat_struct


class MultiRead(NamedTuple):
    """The request, as kazoo's own ones are made; servers know it since release 3.6."""

    paths: tuple[str, ...]
    type: int = 22

    def serialize(self) -> bytearray:
        """The bytes of the request."""
        raw = bytearray()
        for path in self.paths:
            raw += MultiHeader(GetData.type, False, -1).serialize() + GetData(path, None).serialize()
        return raw + MultiHeader(-1, True, -1).serialize()

    @staticmethod
    def deserialize(raw: bytes, offset: int) -> list[Any]:
        """(data, stat) of each path, ``None`` for a missing node; raises what else the server refuses one with."""
        found: list[Any] = []
        header, offset = MultiHeader.deserialize(raw, offset)
        while not header.done:
            if header.type == GetData.type:
                found.append(GetData.deserialize(raw, offset))
                offset += int_struct.size + len(found[-1][0] or b"") + stat_struct.size
            elif EXCEPTIONS[header.err] is NoNodeError:
                found.append(None)
                offset += int_struct.size
            else:
                raise EXCEPTIONS[header.err]()
            header, offset = MultiHeader.deserialize(raw, offset)
        return found


def multi_read_async(client: Any, paths: Sequence[str]) -> Any:
    """kazoo's asynchronous result of that request."""
    result = client.handler.async_result()
    client._call(MultiRead(tuple(paths)), result)
    return result
