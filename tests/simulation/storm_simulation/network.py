"""HTTP between simulated processes: the part of ``httpx`` that the product uses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx as real_httpx

from storm_simulation.kernel import TIMED_OUT, Kernel, Process
from storm_simulation.links import Links


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """Unquoted, without the query."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Response:
    status_code: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    request: Any = None
    url: Any = None

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    def json(self) -> Any:
        return json.loads(self.body)

    def read(self) -> bytes:
        return self.body

    def iter_bytes(self, chunk: int | None = None) -> Iterator[bytes]:
        if self.body:
            yield self.body

    iter_raw = iter_bytes


Handler = Callable[[Request], Response]


class Web:
    """Every HTTP service of the simulated machines."""

    def __init__(self, kernel: Kernel, links: Links) -> None:
        self.kernel = kernel
        self.links = links
        self.services: dict[str, tuple[Process, Handler, str]] = {}
        self.requests = 0
        self.lost_replies = 0

    def serve(self, base: str, process: Process, handler: Handler) -> Callable[[], None]:
        """Offer a service; the result ends it."""
        self.services[base] = (process, handler, process.host.address)

        def end() -> None:
            if self.services.get(base, (None,))[0] is process:
                del self.services[base]

        process.at_end.append(end)
        return end

    def ask(self, base: str, request: Request, connect_secs: float, read_secs: float) -> Response:
        """One exchange, for the process whose thread asks."""
        kernel = self.kernel
        me = kernel.process
        assert me is not None
        self.requests += 1
        kernel.preempt()
        host = urlsplit(base).hostname or ""
        there, back = self.links.delay(me.host.name, host), self.links.delay(host, me.host.name)
        if there is None or back is None:
            kernel.sleep(connect_secs)
            raise real_httpx.ConnectTimeout("timed out")
        kernel.sleep(there)
        service = self.services.get(base)
        if service is None or service[0].dead or service[2] != service[0].host.address:
            kernel.sleep(back)
            raise real_httpx.ConnectError("connection refused")
        target, handler, _ = service
        waiter = kernel.waiter()

        def broken() -> None:
            waiter.fire(real_httpx.ReadError("connection reset"))

        def answer(response: Response) -> None:
            delay = self.links.delay(host, me.host.name)
            if delay is None:
                return
            if self.links.loses_reply(host):
                self.lost_replies += 1
                kernel.after(delay, waiter.fire, real_httpx.ReadError("connection reset"))
            else:
                kernel.after(delay, waiter.fire, response)

        def work() -> None:
            target.spawn(lambda: answer(handler(request)), "http")

        target.at_end.append(broken)
        target.deliver(work)
        found = waiter.wait(read_secs)
        if broken in target.at_end:
            target.at_end.remove(broken)
        if found is TIMED_OUT:
            raise real_httpx.ReadTimeout("timed out")
        if isinstance(found, Exception):
            raise found
        return found


class HttpClient:
    """``httpx.Client``."""

    web: Web | None = None

    def __init__(self, timeout: Any = 5.0, **_: Any) -> None:
        self.timeout = real_httpx.Timeout(timeout)

    def close(self) -> None:
        pass

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        content: bytes | Iterable[bytes] = b"",
        timeout: Any = None,
        **_: Any,
    ) -> Response:
        assert self.web is not None
        patience = self.timeout if timeout is None else real_httpx.Timeout(timeout)
        assert patience.connect is not None and patience.read is not None
        parts = urlsplit(url)
        base = f"{parts.scheme}://{parts.netloc}"
        body = bytes(content) if isinstance(content, bytes | bytearray) else b"".join(content)
        query = {
            **dict(parse_qsl(parts.query)),
            **{key: str(value) for key, value in (params or {}).items()},
        }
        request = Request(method, unquote(parts.path), query, dict(headers or {}), body)
        response = self.web.ask(base, request, patience.connect, patience.read)
        response.request = SimpleNamespace(method=method)
        response.url = real_httpx.URL(url)
        return response

    def get(self, url: str, **how: Any) -> Response:
        return self.request("GET", url, **how)

    def head(self, url: str, **how: Any) -> Response:
        return self.request("HEAD", url, **how)

    def put(self, url: str, **how: Any) -> Response:
        return self.request("PUT", url, **how)

    def post(self, url: str, **how: Any) -> Response:
        return self.request("POST", url, **how)

    def delete(self, url: str, **how: Any) -> Response:
        return self.request("DELETE", url, **how)

    @contextmanager
    def stream(self, method: str, url: str, **how: Any) -> Iterator[Response]:
        yield self.request(method, url, **how)

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Httpx:
    """The module ``httpx`` with our client in it."""

    Client = HttpClient

    def __getattr__(self, name: str) -> Any:
        return getattr(real_httpx, name)


httpx = Httpx()
