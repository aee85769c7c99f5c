"""Alerts: once for each problem, once at its end, and the examples of docs/alerts.md do what they
say.
"""

from __future__ import annotations

import email
import json
import re
import runpy
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest

from storm_dagster import Alert, build_alert_sensor
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY
from storm_dagster.defs.observe import alerts
from storm_rigs.dagster.dagster_results import tick_sensor

pytestmark = pytest.mark.dagster
PAGE = Path(__file__).parents[2] / "docs" / "alerts.md"


@dg.asset(key=ACTIVE_TOPOLOGY, kinds={"storm"})
def active_topology() -> None: ...


@dg.asset
def theirs() -> None: ...


@dg.asset_check(asset=active_topology)
def invariants() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


@dg.asset_check(asset=theirs)
def their_check() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


class Desk:
    """An instance, an alert sensor, and the alerts that it sent."""

    def __init__(self, instance: dg.DagsterInstance, **options: Any) -> None:
        self.instance = instance
        self.sent: list[Alert] = []
        self.deaf = False
        self.cursor: str | None = None
        self.sensor = build_alert_sensor(self.receive, **options)
        self.defs = dg.Definitions(
            assets=[active_topology, theirs],
            asset_checks=[invariants, their_check],
            sensors=[self.sensor],
        )
        self.tick()

    def receive(self, alert: Alert) -> None:
        if self.deaf:
            raise ConnectionError("nobody answers")
        self.sent.append(alert)

    def tick(self) -> list[str]:
        self.sent = []
        self.cursor = tick_sensor(self.sensor, self.instance, self.cursor, self.defs).cursor
        assert len(self.cursor) < 2_000
        return [alert.title for alert in self.sent]

    def evaluate(
        self,
        passed: bool,
        *,
        warn: bool = False,
        key: dg.AssetKey = ACTIVE_TOPOLOGY,
        name: str = "invariants",
    ) -> None:
        self.instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=key,
                check_name=name,
                passed=passed,
                severity=dg.AssetCheckSeverity.WARN if warn else dg.AssetCheckSeverity.ERROR,
                metadata={"found": dg.MetadataValue.md("- task 3 runs twice")},
            )
        )


@pytest.fixture
def desk(instance: dg.DagsterInstance) -> Desk:
    return Desk(instance)


CHECK = "storm/active_topology:invariants"


def test_a_failed_check_is_told_once_and_its_end_once(desk: Desk) -> None:
    desk.evaluate(True)
    assert desk.tick() == []
    desk.evaluate(False)
    assert desk.tick() == [f"ERROR: {CHECK}"]
    assert desk.sent[0].text == "- task 3 runs twice"
    desk.evaluate(False)
    assert desk.tick() == []
    desk.evaluate(True)
    assert desk.tick() == [f"RESOLVED: {CHECK}"]
    assert desk.tick() == []
    desk.evaluate(False)
    assert desk.tick() == [f"ERROR: {CHECK}"]


def test_a_problem_of_days_ends_although_its_check_is_running(desk: Desk) -> None:
    """A tick during the check finds no evaluation, and does not forget the problem."""
    desk.evaluate(False)
    assert desk.tick() == [f"ERROR: {CHECK}"]
    told = json.loads(desk.cursor or "")["told"]
    desk.cursor = json.dumps({"told": dict.fromkeys(told, 1.0)})
    during: list[str] = []

    @dg.asset_check(asset=active_topology, name="invariants")
    def running_check() -> dg.AssetCheckResult:
        during.extend(desk.tick())
        return dg.AssetCheckResult(passed=True)

    selection = dg.AssetSelection.checks(running_check)
    dg.materialize([active_topology, running_check], instance=desk.instance, selection=selection)
    assert during == []
    assert desk.tick() == [f"RESOLVED: {CHECK}"]


def test_foreign_checks_and_warnings_alert_only_on_request(
    instance: dg.DagsterInstance,
) -> None:
    desk, curious = Desk(instance), Desk(instance, warnings=True, selection=dg.AssetSelection.all())
    desk.evaluate(False, warn=True)
    desk.evaluate(False, key=dg.AssetKey("theirs"), name="their_check")
    assert desk.tick() == []
    assert sorted(curious.tick()) == ["ERROR: theirs:their_check", f"WARN: {CHECK}"]


def test_who_could_not_be_told_is_told_later(desk: Desk) -> None:
    desk.deaf = True
    desk.evaluate(False)
    assert desk.tick() == []
    desk.deaf = False
    assert desk.tick() == [f"ERROR: {CHECK}"]
    assert desk.tick() == []


@pytest.mark.parametrize("cursor", ["", "nonsense", "[]", '{"since": "x", "told": 3}'])
def test_a_bad_cursor_starts_anew(desk: Desk, cursor: str) -> None:
    desk.cursor = cursor
    desk.evaluate(False)
    assert desk.tick() == [f"ERROR: {CHECK}"]


def test_a_flood_of_problems_keeps_the_cursor_small(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_MAX_OPEN", 1)
    desk = Desk(instance, selection=dg.AssetSelection.all())
    desk.evaluate(False)
    desk.evaluate(False, key=dg.AssetKey("theirs"), name="their_check")
    assert len(desk.tick()) == 1
    assert desk.tick() == []
    desk.evaluate(True)
    assert desk.tick() == [f"RESOLVED: {CHECK}", "ERROR: theirs:their_check"]


def test_the_end_of_a_problem_makes_room_for_the_next(desk: Desk) -> None:
    """A cursor of the release before, which knew failed runs, too."""
    desk.cursor = json.dumps({"since": 1.0, "told": {"0123456789": 1.0}})
    desk.evaluate(False)
    assert desk.tick() == [f"ERROR: {CHECK}"]
    assert len(json.loads(desk.cursor or "")["told"]) == 1


def test_the_example_reports_a_failed_run_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """Through Dagster's own sensor of failed runs."""
    posted: list[dict[str, Any]] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    @dg.op
    def submit_op() -> None:
        raise dg.Failure("no slot is free")

    @dg.job
    def submit_topology() -> None:
        submit_op()

    run = submit_topology.execute_in_process(
        instance=instance, raise_on_error=False, tags={"dagster/partition": "wc"}
    )
    context = dg.build_run_status_sensor_context(
        sensor_name="storm_run_failures",
        dagster_event=run.get_run_failure_event(),
        dagster_instance=instance,
        dagster_run=run.dagster_run,
    ).for_run_failure()
    with served(ThreadingHTTPServer(("127.0.0.1", 0), Webhook)) as port:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", f"http://127.0.0.1:{port}/hook")
        example(tmp_path, "storm_run_failures")(context)
    (text,) = [message["text"] for message in posted]
    assert text.startswith("*submit_topology of wc failed*") and "no slot is free" in text


def example(folder: Path, function: str) -> Callable[[Any], object]:
    """The function, from the block of the page that defines it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    (block,) = [block for block in blocks if f"def {function}(" in block]
    (folder / "example.py").write_text(block, encoding="utf-8")
    return runpy.run_path(str(folder / "example.py"))[function]


@contextmanager
def served(server: socketserver.TCPServer) -> Iterator[int]:
    """Serve in a thread; the port."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.socket.getsockname()[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def test_the_example_posts_to_slack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    got: list[dict[str, Any]] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if len(got) == 1 else 500)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Webhook)) as port:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", f"http://127.0.0.1:{port}/hook")
        to_slack = example(tmp_path, "to_slack")
        alert = Alert("k", CHECK, "ERROR", "task 3 runs twice")
        to_slack(alert)
        assert got == [{"text": f"*ERROR: {CHECK}*\ntask 3 runs twice"}]
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            to_slack(alert)


def test_the_example_sends_mail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mails: list[str] = []

    class Smtp(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 ready\r\n")
            while line := self.rfile.readline().decode().strip():
                if line.upper() == "DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = iter(self.rfile.readline, b".\r\n")
                    mails.append(b"".join(lines).decode())
                self.wfile.write(b"221 bye\r\n" if line.upper() == "QUIT" else b"250 ok\r\n")
                if line.upper() == "QUIT":
                    return

    with served(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Smtp)) as port:
        monkeypatch.setenv("SMTP_HOST", "127.0.0.1")
        monkeypatch.setenv("SMTP_PORT", str(port))
        to_mail = example(tmp_path, "to_mail")
        to_mail(Alert("k", CHECK, "ERROR", "task 3 runs twice"))
        to_mail(Alert("k", CHECK, "ERROR", "", resolved=True))
    first, last = (email.message_from_string(mail) for mail in mails)
    assert first["Subject"] == f"ERROR: {CHECK}"
    assert "task 3 runs twice" in first.get_payload()
    assert last["Subject"].startswith("RESOLVED")
    assert last["References"] == first["References"]
