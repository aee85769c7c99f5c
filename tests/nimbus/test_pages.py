"""The pages of nimbus as a browser gets them: what they show of a running topology, and that
nothing in them is markup.
"""

from __future__ import annotations

import base64
import re
import socket
import time
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from storm_dagster.model import paths
from storm_dagster.model.records import (
    Assignment,
    AssignmentChange,
    GrayUpgrade,
    StormBase,
    TaskBeats,
    decode_record,
    encode_record,
)
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.protocols.tokens import recorded_token
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.shop import MARKUP, RATE, Shop, open_shop

pytestmark = pytest.mark.zookeeper

PAGES = ("/", "/hosts", "/topologies/shop", "/topologies/shop/placement")
SECRET = "a-secret-planted-for-tests-4711"


@pytest.fixture(scope="module")
def shop(module_stage: Stage) -> Shop:
    return open_shop(module_stage)


class Cells(HTMLParser):
    """Rows of all tables of a page, as text; and names of elements and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._inside = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._inside:
            self.rows[-1][-1] += data

    def row(self, start: str, longer: int = 4) -> list[str]:
        """The first row of a table of more than so many columns that begins like this."""
        found = [[" ".join(cell.split()) for cell in row] for row in self.rows if len(row) > longer]
        return next(row for row in found if row[0].startswith(start))


def page(shop: Shop, path: str, status: int = 200) -> Cells:
    answer = shop.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return Cells(answer.text)


def flowing(shop: Shop) -> bool:
    return page(shop, "/topologies/shop").row("clicks")[1] == f"{RATE}"


@pytest.mark.long
def test_the_rates_of_a_topology_are_what_flows(shop: Shop) -> None:
    eventually(lambda: flowing(shop), 60, "the rate of the spouts")
    found = page(shop, "/topologies/shop")
    components = {"parse", "enrich", "sessions", "score", "alerts<b>"}
    # The table of tuples between workers has four columns, too, with numbers in the third.
    edges = {
        (row[0], row[2]): float(row[3])
        for row in found.rows
        if len(row) == 4 and row[1] == "default" and row[2] in components
    }
    assert edges["clicks", "parse"] == pytest.approx(RATE, rel=0.1)
    assert edges["parse", "enrich"] == pytest.approx(2 * RATE, rel=0.1)
    assert edges["sessions", "score"] == pytest.approx(2 * RATE, rel=0.1)
    assert edges["score", "alerts<b>"] == pytest.approx(4 * RATE / 20, rel=0.2)
    # On a machine that starts other things a bolt may be slow for a moment.
    eventually(lambda: shop.findings() == [], 60, "no finding")
    eventually(
        lambda: "It keeps up, and loses nothing." in page(shop, "/topologies/shop").text,
        30,
        "the good news",
    )
    score = found.row("score")
    assert 0.8 < float(score[2]) < patience(5), "a sleep of 1 ms"


def test_page_and_show_name_the_slow_bolt_not_its_feeder(shop: Shop) -> None:
    def named() -> list[tuple[str, str]]:
        return [
            (one["kind"], one["component"])
            for one in shop.findings()
            if one["kind"] in ("bottleneck", "skew")
        ]

    shop.slow_down()
    try:
        eventually(lambda: named() == [("bottleneck", "enrich")], 60, "the finding")
        (text,) = {one["text"] for one in shop.findings() if one["kind"] == "bottleneck"}
        seen: list[str] = []

        def shown() -> bool:
            found = page(shop, "/topologies/shop")
            seen.append(found.text)
            assert "parse is the bottleneck" not in found.text
            return "enrich is the bottleneck" in found.text and found.row("enrich")[0].endswith(
                "slow"
            )

        eventually(shown, 30, "the same sentence")
        assert text.split(":")[0] in seen[-1]
        assert "stroke-dasharray" in shop.get("/topologies/shop").text
    finally:
        shop.slow_down(False)
    eventually(lambda: named() == [], 90, "the end of the finding", interval=0.5)


def test_the_list_asks_no_topology_master(shop: Shop) -> None:
    def beats() -> TaskBeats:
        raw = shop.cluster.state.get_data(paths.taskbeats(shop.rig.topology_id))
        return decode_record(TaskBeats, raw or b"")

    eventually(lambda: beats().summary.get("rate", 0) > RATE and beats().trend, 60, "the summary")
    found = beats()
    assert (
        len(str(found.summary).replace(" ", "") + found.trend) <= 128 and found.trend[-1] in "bcdef"
    )
    eventually(lambda: float(page(shop, "/").row("shop")[2]) > RATE, 30, "the rate in the list")
    lag = page(shop, "/").row("shop")[6]
    assert re.fullmatch(r"[\d.]+[kMG]?( \+?[-\d.]+[kMG]?/s)?", lag), (
        "the lag, and by how much it grows"
    )
    assert 'class="trend"' in shop.get("/").text and "of the highest rate" in shop.get("/").text
    assert page(shop, "/?q=nothing").text.count("No topology has") == 1
    assert page(shop, "/?q=SHO&sort=rate").row("shop")[1] == "ACTIVE"


def test_history_is_a_picture_and_a_table(shop: Shop) -> None:
    eventually(
        lambda: shop.get("/topologies/shop").text.count('class="chart"') == 3, 60, "the charts"
    )
    focus = "/topologies/shop?focus=enrich"
    # Its first request finds nothing yet, and does not wait for the topology master.
    eventually(lambda: "Tuples that wait" in shop.get(focus).text, 60, "the component's history")
    found = page(shop, focus)
    assert [row for row in found.rows if re.match(r"\d\d:\d\d:\d\d", row[0])]
    tasks = [row for row in found.rows if len(row) == 8 and row[1] == "enrich"]
    assert {row[0] for row in tasks} == {"3", "4"}, "tasks of that component alone"
    assert "One hour" in page(shop, "/topologies/shop?day=1").text


@pytest.mark.parametrize("path", PAGES)
def test_every_page_forbids_what_is_not_its_own(shop: Shop, path: str) -> None:
    answer = shop.get(path)
    policies = answer.headers.get_list("content-security-policy")
    assert (
        len(policies) == 1 and "unsafe" not in policies[0] and "default-src 'none'" in policies[0]
    )
    found = Cells(answer.text)
    assert not {name for name in found.attributes if name.startswith("on") or name == "style"}
    assert not found.elements & {"style", "b", "iframe", "object"}
    assert answer.text.count("<script") == 1, "the one of its own"
    for url in re.findall(r'(?:src|href)="([^"]*)"', answer.text):
        assert url.startswith(("/", "#", "data:,", "http://127.0.0.1", "?")), url
    assert set(re.findall(r'<(?:script|link)[^>]* (?:src|href)="([^"?]*)', answer.text)) == {
        "/static/pages.css",
        "/static/pages.js",
        "data:,",
    }


def test_what_tasks_report_is_a_table(shop: Shop) -> None:
    def lags() -> list[list[str]]:
        return [
            row for row in page(shop, "/topologies/shop?focus=clicks").rows if row[2:3] == ["lag"]
        ]

    eventually(
        lambda: [row[:2] for row in lags()] == [["clicks", "10"]], 30, "the lag of the spout"
    )


def test_what_happened_is_a_table_with_causes_and_runs(shop: Shop) -> None:
    path = paths.assignment(shop.rig.topology_id)
    raw = shop.cluster.state.get_data(path)
    healed = AssignmentChange(
        at_secs=1_700_000_000,
        action="healed",
        why=f"host {MARKUP} is lost",
        moved=3,
        outage_secs=31,
        run="a-run",
    )
    assignment = decode_record(Assignment, raw or b"").model_copy(update={"history": (healed,)})
    shop.cluster.state.set_data(path, encode_record(assignment))

    def shown() -> bool:
        return (
            "What happened" in (text := page(shop, "/topologies/shop").text)
            and "2023-11-14 22:13:20" in text
        )

    eventually(shown, 30, "the change")
    found = page(shop, "/topologies/shop").row("2023-11-14 22:13:20", 3)
    assert (
        found[1] == "healed"
        and found[2] == f"host {MARKUP} is lost, 3 tasks moved, silent for 31 s before"
    )
    assert "http://127.0.0.1:1/runs/a-run" in shop.get("/topologies/shop").text


def test_a_failed_upgrade_is_quoted(shop: Shop) -> None:
    path = paths.topology(shop.rig.topology_id)
    raw = shop.cluster.state.get_data(path) or b""
    reason = f"h1:6700: count[7]: ValueError: {MARKUP} (shop.py, line 3)"
    failed = GrayUpgrade(expires=1, code_dir="shop.2", rollback=True, reason=reason)
    changed = decode_record(StormBase, raw).model_copy(update={"last_upgrade": failed})
    text = f"The upgrade to shop.2 was rolled back: {reason}."
    shop.cluster.state.set_data(path, encode_record(changed))
    try:
        eventually(lambda: text in page(shop, "/topologies/shop").text, 30, "the failed upgrade")
    finally:
        shop.cluster.state.set_data(path, raw)


def test_markup_in_names_errors_and_reasons_is_text(shop: Shop) -> None:
    eventually(lambda: MARKUP in page(shop, "/topologies/shop").text, 30, "the error")
    assert "alerts<b>" in page(shop, "/topologies/shop").text
    assert MARKUP in page(shop, "/topologies/shop/placement").text
    found = page(shop, "/topologies/%3Cscript%3E", 404)
    assert "'<script>'" in found.text and "script" in found.elements
    assert "<script>" not in shop.get("/topologies/%3Cscript%3E").text


def test_what_is_not_there_is_a_page_too(shop: Shop) -> None:
    assert "is not alive" in page(shop, "/topologies/none", 404).text
    assert "no component" in page(shop, "/topologies/shop?focus=none", 404).text
    assert "must be one of" in page(shop, "/topologies/shop?sort=none", 400).text
    assert shop.get("/static/none.js").status_code == 404
    assert shop.get("/static/..%2Froutes.py").status_code == 404


def test_a_page_changes_nothing_and_says_how(shop: Shop) -> None:
    found = page(shop, "/topologies/shop")
    assert found.row("rebalance", 2)[1] == "storm-dagster rebalance shop -n WORKERS -e COMPONENT=N"
    assert (
        "http://127.0.0.1:1/locations/storm/jobs/kill_topology/playground"
        in shop.get("/topologies/shop").text
    )
    for path in PAGES:
        assert httpx.post(shop.nimbus.url + path, trust_env=False).status_code == 405


def test_the_graph_alone_is_a_file(shop: Shop, tmp_path: Path) -> None:
    answer = shop.get("/topologies/shop/graph.svg")
    assert (
        answer.headers["content-type"] == "image/svg+xml"
        and "unsafe" in answer.headers["content-security-policy"]
    )
    assert "alerts&lt;b&gt;" in answer.text and "<a " not in answer.text
    assert shop.get("/topologies/none/graph.svg").json()["error"]["type"] == "NotAlive"
    seeds = (
        "-c",
        f"nimbus.seeds=[{shop.nimbus.url.removeprefix('http://')}]",
        "-c",
        "storm.local.hostname=localhost",
    )
    printed = run_cli("visualize", "shop", *seeds, home=tmp_path).check().out
    assert (
        printed.startswith("<svg ")
        and "alerts&lt;b&gt;" in printed
        and printed.endswith("</svg>\n")
    )


def test_hosts_show_what_runs_in_each_slot(shop: Shop) -> None:
    found = page(shop, "/hosts")
    slots = {row[2]: row[3] for row in found.rows[1:] if len(row) == 6}
    sizes = [row for row in found.rows if len(row) == 5]
    # Supervisors of the release before do not say where their sizes come from.
    assert sizes[0][2] == "from" and {row[2] for row in sizes[1:]} == {"not stated"}
    assert slots == {"1": "free", **{str(port): "shop" for port in shop.ports}}


def test_a_silent_topology_master_delays_no_page_and_no_change(shop: Shop) -> None:
    """A listener that answers nothing stands in the place of a second topology's master."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        silent = _Silent(shop, listener.getsockname()[1])
        try:
            eventually(lambda: shop.get("/topologies/silent").status_code == 200, 20, "the view")
            times: list[float] = []
            for _ in range(8):
                began = time.monotonic()
                found = page(shop, "/topologies/silent")
                times.append(time.monotonic() - began)
                assert "no statistics yet" in found.text
            answer = httpx.post(
                f"{shop.nimbus.url}/v1/topologies/silent/deactivate",
                json={"dry_run": True},
                timeout=20,
            )
            assert answer.json()["would"] == "deactivate"
            print("slowest page:", max(times))
        finally:
            silent.remove()


class _Silent:
    """Records of a topology whose one worker is at ``port``."""

    def __init__(self, shop: Shop, port: int) -> None:
        from storm_dagster.model.records import (
            Assignment,
            ComponentTasks,
            StormBase,
            TaskTable,
            WorkerNode,
            WorkerSlot,
            encode_record,
        )

        self.state, self.id = shop.cluster.state, "silent-1-1700000000"
        base = StormBase(
            name="silent",
            launch_time_secs=1700000000,
            status="ACTIVE",
            workers=1,
            executors={},
            token="t",
        )
        slot = WorkerSlot(node="s9", host="127.0.0.1", port=port, tasks="1-2")
        node = WorkerNode(
            pid=1, token="secret", version=0, tasks="1-2", started_ms=0, status="running"
        )
        table = TaskTable(
            components={
                "__topology_master": ComponentTasks(type="bolt", tasks="1"),
                "count": ComponentTasks(type="bolt", tasks="2"),
            }
        )
        assignment = Assignment(
            topology_id=self.id,
            code_dir=self.id,
            node_host={"s9": "127.0.0.1"},
            workers=(slot,),
            task_start_secs={},
            timestamp_ms=1,
        )
        self.made = [
            (paths.tasks(self.id), encode_record(table)),
            (paths.worker(self.id, "s9", port), encode_record(node)),
            (paths.assignment(self.id), encode_record(assignment)),
            (paths.topology(self.id), encode_record(base)),
        ]
        for path, data in self.made:
            self.state.mkdirs(path.rpartition("/")[0])
            self.state.create_node(path, data)

    def remove(self) -> None:
        for path, _ in reversed(self.made):
            self.state.delete_node(path)


def history(shop: Shop, nimbus: NimbusThread) -> list[str]:
    """Times of the first chart's table, newest first, as this nimbus shows them."""
    found = Cells(nimbus.get("/topologies/shop").text)
    times = [
        row[0] for row in found.rows if len(row) == 3 and re.fullmatch(r"\d\d:\d\d:\d\d", row[0])
    ]
    return times[: times.index(min(times)) + 1] if times else []


@pytest.mark.long
def test_history_outlives_the_leader_and_marks_a_topology_masters_gap(
    shop: Shop,
) -> None:
    eventually(lambda: len(history(shop, shop.nimbus)) >= 3, 90, "a history")
    second = shop.stage.nimbus("n2").await_serving()
    before = history(shop, shop.nimbus)
    assert shop.nimbus.stop() == 0
    shop.nimbus = second.await_leading()
    eventually(
        lambda: second.get("/topologies/shop").status_code == 200, 60, "the code of the topology"
    )
    after = history(shop, second)
    assert set(before) <= set(after), "nothing that was shown is gone"
    # The slot of the topology master.
    slot = ("s1", shop.ports[0])
    shop.rig.processes[slot].kill()
    shop.rig.processes[slot].wait()
    killed = f"{datetime.now(timezone.utc):%H:%M:%S}"
    shop.rig.start(*slot)
    eventually(
        lambda: (found := history(shop, second)) != [] and min(found) >= killed, 90, "a new history"
    )
    text = second.get("/topologies/shop").text
    assert text.count('class="gap"') == 3 and "the topology master was not there" in text
    eventually(lambda: shop.rig.running() and flowing(shop), 90, "everything runs again")


def test_a_secured_cluster_asks_a_browser_for_a_token(stage: Stage, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    stage.conf["storm.secret.file"] = str(secret)
    nimbus = stage.nimbus().await_leading()
    try:
        with (
            httpx.Client(base_url=nimbus.url, timeout=20, trust_env=False) as http,
            nimbus.client() as admin,
        ):

            def answer(path: str, scope: Any = None, secret: str = SECRET) -> httpx.Response:
                token = recorded_token(admin, secret, scope) if scope else ""
                basic = base64.b64encode(f"anyone:{token}".encode()).decode()
                return http.get(path, headers={"Authorization": f"Basic {basic}"} if scope else {})

            for path in ("/", "/hosts", "/topologies/wc", "/topologies/wc/placement"):
                asked = answer(path)
                assert asked.status_code == 401 and asked.headers["www-authenticate"].startswith(
                    "Basic realm="
                )
                assert answer(path, "metrics").status_code == 403
                assert (
                    answer(path, "read", "another-secret-of-forty-two-letters").status_code == 401
                )
                assert answer(path, "read").status_code in (200, 404)
            assert answer("/v1/topologies").headers["www-authenticate"] == "Bearer"
            assert answer("/static/pages.css").status_code == 200, (
                "it is the same for every cluster"
            )
            assert "No topology runs." in answer("/", "read").text
    finally:
        nimbus.stop()
