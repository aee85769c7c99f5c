"""Logs of daemons: what a traceback shows, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, sys
from pathlib import Path
from storm_dagster.cli.log_setup import configure_daemon_logging

def fail(password):
    raise ValueError("refused")

conf = {"storm.log.level": "INFO", "storm.log.format": sys.argv[2]}
configure_daemon_logging(Path(sys.argv[1]), "nimbus", "n1", conf)
try:
    fail("".join(["hun", "ter2"]))
except ValueError:
    logging.getLogger("storm_dagster").exception("a request failed", extra={"topology": "wc-1-2"})
"""


def test_a_traceback_names_lines_but_no_values_of_local_variables(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "text"],
        capture_output=True,
        text=True,
        check=True,
    )
    (file,) = (tmp_path / "logs").iterdir()
    for text in (file.read_text(encoding="utf-8"), ended.stderr):
        assert "a request failed" in text
        assert "ValueError: refused" in text
        assert "in fail" in text
        assert "hunter2" not in text


def test_json_logs_have_a_document_in_each_line(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    (file,) = (tmp_path / "logs").iterdir()
    for text in (file.read_text(encoding="utf-8"), ended.stderr):
        (line,) = text.splitlines()
        document = json.loads(line)
        assert (
            document["message"] == "a request failed"
            and "ValueError: refused" in document["exception"]
        )
        assert {key: document[key] for key in ("role", "id", "level", "topology")} == {
            "role": "nimbus",
            "id": "n1",
            "level": "ERROR",
            "topology": "wc-1-2",
        }
        assert document["time"].endswith("+00:00") and "hunter2" not in line
