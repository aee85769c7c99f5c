"""Described routes, asked with what schemathesis makes up: nothing breaks, and answers are as
described.
"""

from __future__ import annotations

import httpx
import pytest

from storm_rigs.protocols.fuzzing import SEARCHING
from storm_rigs.stage.storm_rest import StormRest

pytestmark = [pytest.mark.zookeeper, pytest.mark.fuzz, pytest.mark.timeout(300)]

EVERY = 1 if SEARCHING else 8
"""``make test`` asks one of eight routes; ``make fuzz`` and ``make test-all`` all of them."""


def test_nimbus_withstands_made_up_requests(rest: StormRest) -> None:
    from storm_rigs.protocols.made_up_requests import fuzz

    document = rest.http.get("/openapi.json").json()
    known = {"id": rest.id, "name": "wc", "component": "split", "key": f"{rest.id}-stormconf.ser"}
    asked = {label.split(" ", 1)[1] for label in fuzz(document, rest.url, known, EVERY)}
    assert asked <= set(document["paths"]) and len(asked) >= len(document["paths"]) // EVERY // 2
    assert EVERY > 1 or asked == set(document["paths"])
    health = rest.http.get("/healthz").json()
    assert health["leader"] is True and health["status"] == "ok"
    assert rest.get(f"/topology/{rest.id}")["id"] == rest.id


def test_a_supervisor_withstands_made_up_requests(rest: StormRest) -> None:
    from storm_rigs.protocols.made_up_requests import fuzz

    document = httpx.get(f"{rest.supervisor}/openapi.json", trust_env=False, timeout=20).json()
    assert len(fuzz(document, rest.supervisor, {})) >= len(document["paths"])
