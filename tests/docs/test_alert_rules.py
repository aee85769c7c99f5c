"""docs/prometheus-alerts.yml: over metrics that exist, and each alert fires when it should and not
before.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from storm_dagster.cli.app import VERBS
from storm_dagster.nimbus.http import metrics

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docs" / "prometheus-alerts.yml"
TESTS = Path(__file__).parent / "prometheus-alerts.test.yml"


def rules() -> list[dict]:
    return [
        rule
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def test_every_rule_is_over_metrics_of_nimbus_and_names_a_remedy() -> None:
    code = Path(metrics.__file__)
    known = set(re.findall(r'"(storm_\w+)"', code.read_text(encoding="utf-8")))
    known |= set(
        re.findall(r"^  (storm_\w+):", code.with_suffix(".yaml").read_text(encoding="utf-8"), re.M)
    )
    for rule in rules():
        names = re.findall(r"storm_\w+", rule["expr"])
        used = {name if name in known else name.removesuffix("_total") for name in names}
        assert used <= known, rule["alert"]
        assert used or rule["expr"].startswith("up")
        assert rule["annotations"]["summary"] and rule["annotations"]["remedy"]
        verbs = re.findall(r"storm-dagster ([a-z-]+)", rule["annotations"]["remedy"])
        assert set(verbs) <= set(VERBS), rule["alert"]


def test_every_rule_has_a_case() -> None:
    cases = TESTS.read_text(encoding="utf-8")
    assert [rule["alert"] for rule in rules() if rule["alert"] not in cases] == []


def test_promtool_accepts_the_rules_and_their_cases() -> None:
    here = Path(sys.executable).with_name("promtool")
    promtool = str(here) if here.exists() else shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: make promtool fetches it on Debian and Ubuntu")
    for arguments in (["check", "rules", str(RULES)], ["test", "rules", str(TESTS)]):
        done = subprocess.run(
            [promtool, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
