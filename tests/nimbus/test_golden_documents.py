"""Documents that scripts of others read, each byte by byte, for a cluster made by hand.

A document may get further keys: then write the file again (``GOLDEN=write``) and read the
difference. What was there before must stay.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.http.storm.cluster_pages import ClusterPages
from storm_dagster.nimbus.http.storm.topology_pages import TopologyPages
from storm_dagster.nimbus.http.storm.visualization import visualization
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.thrift.idl import STORM_VERSION
from storm_dagster.nimbus.thrift.pages import Pages
from storm_dagster.nimbus.thrift.summaries import Summaries
from storm_rigs.protocols.fixed_cluster import HALF, NOW_SECS, QUIET, SHOP, FixedCluster

FOLDER = Path(__file__).parent / "golden"
WINDOWS = ("600", ":all-time")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Nimbus, ClusterReader]]:
    monkeypatch.setattr("time.time", lambda: float(NOW_SECS))
    with FixedCluster().reading() as served:
        yield served


def show(nimbus: Nimbus, reader: ClusterReader) -> Any:
    """``show --json``, which is ``GET /v1/topologies/NAME``."""
    return {name: reader.show(name) for name in (SHOP, QUIET, HALF)}


def listing(nimbus: Nimbus, reader: ClusterReader) -> Any:
    """``list --json`` and ``GET /v1/cluster``."""
    return {"topologies": reader.list_topologies(), "cluster": reader.cluster()}


def storm_rest(nimbus: Nimbus, reader: ClusterReader) -> Any:
    """Storm's REST: pages of topologies, components, workers, supervisors."""
    pages = TopologyPages(nimbus, reader)
    cluster = ClusterPages(nimbus, reader)
    found: dict[str, Any] = {
        "cluster/summary": cluster.summary(),
        "supervisor/summary": cluster.supervisors(),
        "supervisor?id=s1": cluster.supervisor("s1", None, True),
        "topology/summary": cluster.topologies(),
        "owner-resources": cluster.owners(),
    }
    for topology in (SHOP, QUIET, HALF):
        for window in WINDOWS:
            for sys in (False, True):
                page = pages.page(topology, window, sys)
                # The cluster's conf is another subject.
                page["configuration"] = sorted(page["configuration"])[:0]
                found[f"topology/{topology}?window={window}&sys={sys}"] = page
                at = f"{topology}?window={window}&sys={sys}"
                found[f"metrics/{at}"] = pages.metrics(topology, window, sys)
                found[f"visualization/{at}"] = visualization(reader, topology, window, sys)
        found[f"workers/{topology}"] = cluster.topology_workers(topology)
        found[f"lag/{topology}"] = pages.lag(topology)
        found[f"errors/{topology}"] = pages.errors(topology)
    for component in ("count", "orders", "price", "__acker"):
        for window in WINDOWS:
            found[f"component/{component}?window={window}"] = pages.component(
                SHOP, component, window, False
            )
    return found


def thrift(nimbus: Nimbus, reader: ClusterReader) -> Any:
    """Thrift: TopologyInfo and the page-info structures."""
    summaries = Summaries(nimbus, reader)
    pages = Pages(reader, summaries)
    topologies = reader.view().topologies
    found: dict[str, Any] = {
        "supervisor": pages.supervisor_page("s1", None, True),
        "cluster": summaries.cluster(),
        "owners": summaries.owners(None),
    }
    for topology in (SHOP, QUIET, HALF):
        view = topologies[topology]
        found[f"info {topology}"] = pages.topology_info(view)
        for window in WINDOWS:
            page = pages.topology_page(view, window, True)
            page.topology_conf = ""
            found[f"page {topology} {window}"] = page
    for component in ("count", "orders", "price", "__acker"):
        for window in WINDOWS:
            found[f"component {component} {window}"] = pages.component_page(
                topologies[SHOP], component, window, False
            )
    return plain(found)


def plain(value: Any) -> Any:
    """Thrift's structures as JSON; keys that are structures become their text."""
    if hasattr(value, "thrift_spec"):
        return {
            name: plain(getattr(value, name))
            for name in sorted(entry[1] for entry in value.thrift_spec.values())
        }
    if isinstance(value, Mapping):
        return {
            json.dumps(plain(key)) if hasattr(key, "thrift_spec") else str(key): plain(item)
            for key, item in value.items()
        }
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def prometheus(nimbus: Nimbus, reader: ClusterReader) -> Any:
    """``/metrics``: every line but those of the process."""
    text = bytes(Metrics(nimbus, reader).response().body).decode()
    lines = [line for line in text.splitlines() if not re.search(r"_created|uptime", line)]
    return [line for line in lines if "storm_nimbus" not in line]


FORMATS: dict[str, Callable[[Nimbus, ClusterReader], Any]] = {
    function.__name__: function for function in (show, listing, storm_rest, thrift, prometheus)
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_document_stays_as_it_is(name: str, served: tuple[Nimbus, ClusterReader]) -> None:
    document = FORMATS[name](*served)
    # Order of keys included: scripts print them.
    text = json.dumps(document, indent=1).replace(STORM_VERSION, "STORM_VERSION") + "\n"
    path = FOLDER / f"{name}.json"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
