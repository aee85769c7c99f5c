"""The profile ``monitoring`` of docker/compose.yaml: Prometheus reads both nimbuses with its token,
and has our rules.
"""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from containers import ROOT, Containers, Failure

RULES = ROOT / "docs" / "prometheus-alerts.yml"


def ask(made: Containers, path: str) -> Any:
    """What Prometheus' HTTP API answers, through the port that compose publishes on loopback."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{made.env['PROMETHEUS_PORT']}/api/v1/{path}", timeout=10
    ) as answer:
        return json.load(answer)["data"]


def check_monitoring(made: Containers, topology: str, say: Callable[[str], None]) -> None:
    """Build and start Prometheus as docker/README.md says; its targets are up, its rules ours, no
    alert of them fires.
    """
    made.setup(STORM_SECRET="", MONITORING="1")
    made.compose(
        "--profile", "monitoring", "up", "-d", "--no-deps", "--wait", "prometheus", timeout=240
    )
    deadline = time.monotonic() + 120
    query = urllib.parse.quote(f'storm_topology_workers_live{{topology="{topology}"}}')
    while True:
        health = {
            target["labels"]["instance"]: target["health"]
            for target in ask(made, "targets")["activeTargets"]
        }
        seen = [float(row["value"][1]) for row in ask(made, f"query?query={query}")["result"]]
        if health == {"nimbus1:7621": "up", "nimbus2:7621": "up"} and 3.0 in seen:
            break
        if time.monotonic() > deadline:
            raise Failure(
                f"Prometheus has no metrics of both nimbuses: {health}, live workers of {topology}: {seen}"
            )
        time.sleep(2)
    rules = [rule for group in ask(made, "rules")["groups"] for rule in group["rules"]]
    wanted = RULES.read_text(encoding="utf-8").count("- alert: ")
    if len(rules) != wanted or any(rule["health"] == "err" for rule in rules):
        raise Failure(
            f"{wanted} alerts are written, Prometheus has {[(rule['name'], rule['health']) for rule in rules]}"
        )
    firing = [
        alert["labels"]["alertname"]
        for alert in ask(made, "alerts")["alerts"]
        if alert["state"] == "firing"
    ]
    if firing:
        raise Failure(f"alerts of a healthy cluster: {firing}")
    say(f"Prometheus reads both nimbuses and watches {wanted} rules; none of them fires")
