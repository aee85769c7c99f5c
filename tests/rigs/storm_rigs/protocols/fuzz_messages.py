"""Messages for :mod:`storm_rigs.protocols.fuzzing`: nearly valid ones of each protocol."""

from __future__ import annotations

import json
import random
import struct
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from storm_dagster.model.wire import Frame, encode_frame
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_rigs.protocols.fuzzing import Message
from storm_rigs.protocols.thrift_calls import encode_call

_INTEGERS = (0, 1, -1, 7, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
_TEXTS = (
    *(
        "",
        "wc",
        "wc-1-1700000000",
        "../../etc/passwd",
        "..%2f..%2fetc",
        "a" * 5_000,
        "é\u202e\0",
        "<script>alert(1)</script>",
    ),
    *(
        "x;touch p",
        "$(id)",
        "(a+)+$",
        "%00",
        "-1",
        "9" * 400,
        "\r\nHost: evil",
        "{}",
        "[" * 3_000,
        "__acker",
        "worker.log",
    ),
)


def text(draw: random.Random) -> str:
    """A text with which something might go wrong."""
    return draw.choice(_TEXTS) if draw.random() < 0.8 else draw.randbytes(12).decode("latin-1")


def value(draw: random.Random, depth: int = 0) -> Any:
    """A value of JSON or MessagePack."""
    kind = draw.randrange(8 if depth < 4 else 5)
    if kind == 0:
        return draw.choice(_INTEGERS[:7])
    if kind == 1:
        return draw.choice((None, True, False, 1.5, 1e308))
    if kind < 5:
        return text(draw)
    if kind < 7:
        return [value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3, 40)))]
    return {text(draw): value(draw, depth + 1) for _ in range(draw.choice((0, 1, 5)))}


def http_messages(paths: dict[str, Any]) -> Message:
    """Requests for the paths of an OpenAPI document, by methods that they have and others."""
    routes = [
        (
            method.upper(),
            path,
            [part["name"] for part in operation.get("parameters", ()) if part.get("in") == "query"],
        )
        for path, operations in paths.items()
        for method, operation in operations.items()
    ]

    def message(draw: random.Random) -> bytes:
        method, path, names = draw.choice(routes)
        while "{" in path:
            head, _, rest = path.partition("{")
            path = f"{head}{quote(text(draw), safe=draw.choice(('', '/')))[:3000]}{rest.partition('}')[2]}"
        if draw.random() < 0.2:
            method = draw.choice(
                (
                    "GET",
                    "POST",
                    "PUT",
                    "DELETE",
                    "HEAD",
                    "OPTIONS",
                    "PATCH",
                    "CONNECT",
                    "get",
                    "PRI",
                )
            )
        query = urlencode(
            [
                (draw.choice(names) if names else text(draw)[:9], text(draw))
                for _ in range(draw.randrange(4))
            ]
        )
        body = draw.choice(
            (b"", json.dumps(value(draw)).encode(), draw.randbytes(draw.choice((10, 40_000))))
        )
        length = (
            str(len(body))
            if draw.random() < 0.8
            else draw.choice(("-1", "99999999999", "0", "x", "1, 2"))
        )
        headers = [
            ("Host", draw.choice(("127.0.0.1", "localhost", "evil.example", ""))),
            ("Content-Length", length),
        ]
        oddities = [
            (
                "Content-Type",
                draw.choice(("application/json", "text/plain", "multipart/form-data")),
            ),
            ("Transfer-Encoding", "chunked"),
            ("Range", f"bytes={draw.choice(_INTEGERS)}-{draw.choice(_INTEGERS)}"),
            ("Origin", "https://evil.example"),
            ("Authorization", f"Bearer {text(draw)}"),
            ("Expect", "100-continue"),
            ("Upgrade", "websocket"),
            ("doAsUser", text(draw)),
            ("X-" + "a" * draw.choice((1, 3_000)), text(draw)),
        ]
        headers += draw.sample(oddities, draw.randrange(4))
        head = f"{method} {path}{'?' + query if query else ''} HTTP/{draw.choice(('1.1', '1.1', '1.1', '1.0', '2.0'))}\r\n"
        head += "".join(f"{name}: {content}\r\n" for name, content in headers)
        return head.encode("utf-8", "replace") + b"\r\n" + body

    return message


_PAGES = (
    "/",
    "/runs/{run}",
    "/server_info",
    "/graphql",
    "/report_asset_check/{key}",
    "/logs/{run}/{step}",
    "/{file}",
)
"""Of Dagster's web application."""


def web_messages(largest: int) -> Message:
    """Requests for Dagster's web application: with bodies up to ``largest`` bytes whose end never
    comes, and WebSockets.
    """
    paths = {
        path: {"get": {"parameters": [{"in": "query", "name": "query"}]}, "post": {}}
        for path in _PAGES
    }
    plain = http_messages(paths)
    names = ["key", "config", "query", "variables"]

    def message(draw: random.Random) -> bytes:
        kind = draw.random()
        if kind < 0.7:
            return plain(draw)
        if kind < 0.75:
            body = draw.choice((b'{"query": "', b"[" * 3_000)) + b"a" * draw.choice(
                (1_000, largest // 9, largest)
            )
            return b"POST /graphql HTTP/1.1\r\nHost: localhost\r\n" + (
                b"Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n" + body
            )
        oddity = draw.choice(
            ("Sec-WebSocket-Version: 13", "Origin: http://localhost", "Sec-WebSocket-Extensions: x")
        )
        head = f"GET {draw.choice(('/graphql', '/', '/nowhere'))} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        head += f"Upgrade: websocket\r\nSec-WebSocket-Key: {draw.choice(('dGhlIHNhbXBsZSBub25jZQ==', 'x'))}\r\n{oddity}\r\n"
        whole = (
            head.encode()
            + b"Sec-WebSocket-Protocol: graphql-ws\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        for _ in range(draw.randrange(4)):
            started: Any = {
                "type": "start",
                "id": text(draw),
                "payload": {draw.choice(names): value(draw)},
            }
            part = json.dumps(
                draw.choice(({"type": "connection_init"}, started, value(draw)))
            ).encode()
            size = len(part) if draw.random() < 0.8 else draw.choice((2**63 - 1, 2**26, 0))
            whole += draw.choice((b"\x81", b"\x82", b"\x01", b"\x89", b"\x88", b"\xf1"))
            whole += b"\xff" + struct.pack("!Q", size) + bytes(4) + part
        return whole

    return message


def thrift_messages() -> Message:
    """Framed calls of every method, with arguments of the right types and others."""
    service = load_idl().Nimbus

    def struct_of(kind: Any, draw: random.Random, depth: int) -> Any:
        made = kind()
        for field_type, name, *details in kind.thrift_spec.values():
            if depth < 3 and draw.random() < 0.7:
                setattr(
                    made,
                    name,
                    of(field_type, details[0] if len(details) > 1 else None, draw, depth + 1),
                )
        return made

    def of(kind: int, more: Any, draw: random.Random, depth: int) -> Any:
        if kind == 2:
            return draw.random() < 0.5
        if kind in (3, 6, 8, 10):
            bits = {3: 8, 6: 16, 8: 32, 10: 64}[kind]
            return draw.choice([n for n in _INTEGERS if -(2 ** (bits - 1)) <= n < 2 ** (bits - 1)])
        if kind == 4:
            return draw.choice((0.0, -1.5, 1e308, float("nan")))
        if kind == 12:
            return struct_of(more, draw, depth)

        def inner(part: Any) -> Any:
            part_kind, details = part if isinstance(part, tuple) else (part, None)
            return of(part_kind, details, draw, depth)

        if kind == 13:
            return {inner(more[0]): inner(more[1]) for _ in range(draw.randrange(3))}
        if kind in (14, 15):
            return [inner(more) for _ in range(draw.choice((0, 1, 5)))]
        return text(draw)

    def message(draw: random.Random) -> bytes:
        name = draw.choice(service.thrift_services)
        try:
            arguments = vars(struct_of(getattr(service, f"{name}_args"), draw, 0))
            frame = encode_call(name, draw.choice(_INTEGERS[:6]), **arguments)
        except Exception:
            # Thrift's own writer refuses it: an unhashable key, a number of another size.
            frame = encode_call("getNimbusConf", 1)
        return struct.pack("!i", len(frame)) + frame

    return message


def worker_messages(token: str, own: str) -> Message:
    """ZeroMQ's handshake, then frames and requests: of unknown senders, of a peer, and for this
    worker.
    """
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"

    def message(draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            payload = encode_frame(Frame("outsider"))
            with_values: Any = [
                (
                    draw.choice((1, 2, 99)),
                    7,
                    text(draw)[:20],
                    [(0, draw.choice((0, 1)), [[value(draw)]])],
                )
            ]
            try:
                payload = encode_frame(Frame(draw.choice(("outsider", token)), with_values))
            except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError):
                pass
        else:
            request = {
                "op": draw.choice(("stats", "stacks", "ping", "state", "dead_letters", text(draw)))
            }
            request |= {"token": draw.choice(("outsider", own)), text(draw): value(draw)}
            payload = json.dumps(request).encode()
        whole = greeting + bytes([4, len(ready)]) + ready if draw.random() < 0.9 else b""
        for part in (payload, payload) if draw.random() < 0.1 else (payload,):
            size = len(part) if draw.random() < 0.9 else draw.choice((2**63 - 1, 2**31, 64 * 2**20))
            whole += (
                bytes([0, size]) + part if size < 256 else b"\x02" + struct.pack("!Q", size) + part
            )
        return whole

    return message


def batch_messages(draw: random.Random) -> bytes:
    """What a client of the endpoint of Spark's batches sends: answers to a challenge, a greeting,
    chunks.
    """
    parts = [
        draw.choice(
            (
                b"#WELCOME#",
                b"#CHALLENGE#" + draw.randbytes(40),
                draw.randbytes(16),
                b"{sha256}" + draw.randbytes(32),
            )
        )
    ]
    parts.append(json.dumps({"batch": value(draw)}).encode())
    parts.append(draw.randbytes(draw.choice((0, 100, 60_000))))
    sizes = (draw.choice((len(part), len(part), len(part), 2**31 - 1, -1, 0)) for part in parts)
    return b"".join(struct.pack("!i", size) + part for size, part in zip(sizes, parts, strict=True))
