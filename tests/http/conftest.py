"""A real HTTP service over a folder of logs."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette

from storm_dagster.http.description import HttpApi
from storm_dagster.http.guard import Guard, allowed_hosts
from storm_dagster.http.logs.routes import LogRoutes
from storm_dagster.http.responses import EXCEPTION_HANDLERS
from storm_dagster.http.server import HttpService, listen
from storm_rigs.protocols.served_logs import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    logs = home / "logs"
    (logs / "workers").mkdir(parents=True)
    conf = {
        "storm.secret": "planted",
        "storm.zookeeper.port": 2181,
        "nimbus.file.copy.expiration.secs": 2,
    }
    routes = LogRoutes(logs, lambda port: f"stacks of {port}\n", conf)
    api = HttpApi("logs", "1")
    api.add(routes)
    table = api.routes()
    app = Starlette(routes=table, exception_handlers=EXCEPTION_HANDLERS)
    listener = listen("127.0.0.1", 0, "test")
    port = listener.getsockname()[1]
    guard = Guard(app, hosts=allowed_hosts([]), observe=lambda *_: None, routes=table)
    service = HttpService(guard, listener)
    service.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
        yield Served(logs, port, client)
    service.stop()
