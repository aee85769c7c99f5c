"""Output of a verb: a JSON document or tables, and progress."""

import datetime
import json
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from storm_dagster.model.names import INVISIBLE
from storm_dagster.model.operation_text import operation_text

# Control characters but tab and line feed, and those that are not seen or turn the text around.
_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{INVISIBLE}]")
_INVISIBLE_CODES = [
    code for code in range(0x600, 0x10000) if re.fullmatch(f"[{INVISIBLE}]", chr(code))
]
# Such characters after ASCII. JSON itself escapes those below.
_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *_INVISIBLE_CODES)}


def plain(text: object) -> str:
    """Replace control characters, and those that hide or turn text, by ``?``.

    The text then cannot drive the terminal, and is what it looks like.
    """
    return _CONTROL.sub("?", str(text))


def print_json(document: Any) -> None:
    """Print the one JSON document of a verb.

    No character of it drives the terminal.
    """
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, default=str).translate(_ESCAPED))


def print_line(as_json: bool, document: Any, text: str) -> None:
    """Print the document as JSON, or the line that says the same."""
    if as_json:
        print_json(document)
    else:
        click.echo(text)


def notify(text: str) -> None:
    """Print one line on standard error."""
    click.echo(plain(text), err=True)


def human_seconds(seconds: float | None) -> str:
    """Format seconds by their two largest units, such as ``1m 15s``.

    ``None`` is ``-``.
    """
    if seconds is None:
        return "-"
    days, remainder = divmod(int(seconds), 86400)
    hours, remainder = divmod(remainder, 3600)
    minutes, secs = divmod(remainder, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (secs, "s")]
    words = [f"{value}{unit}" for value, unit in parts if value]
    return " ".join(words[:2]) or "0s"


Rows = Iterable[Mapping[str, Any] | Sequence[object]]


def _cell(row: Mapping[str, Any], column: str) -> object:
    """The value of a row in a column of a table.

    ``None`` if the row has none.
    """
    if column == "uptime":
        return human_seconds(row.get("uptime_secs"))
    if column == "host:port":
        return f"{row['host']}:{row['port']}" if row.get("port") else None
    value = row.get(column)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or None
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.2f}"
    return value


def print_table(title: str, columns: str | Sequence[str], rows: Rows) -> None:
    """Print a table on standard output; cells are text, never markup.

    ``columns`` are names, also separated by spaces in one string. In ``header=key``, the header
    differs from the key of rows that are maps.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if title:
        sys.stdout.write(plain(title) + "\n")
    table = Table(show_edge=False, show_header=any(columns))
    keys: list[str] = []
    for column in columns.split() if isinstance(columns, str) else columns:
        header, _, key = column.partition("=")
        table.add_column(header, overflow="fold")
        keys.append(key or header)
    for row in rows:
        cells = [_cell(row, key) for key in keys] if isinstance(row, Mapping) else row
        table.add_row(*(Text(plain("-" if cell is None else cell)) for cell in cells))
    # Piped output is not cut at 80 columns.
    sys.stdout.flush()
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def row_for_table(row: Mapping[str, Any]) -> dict[str, Any]:
    """Add the columns that only tables have to a row."""
    cells = dict(row)
    cells["role"] = "leader" if row.get("leader") else "follower"
    down = row.get("not_running")
    if down:
        cells["tasks"] = f"{row['tasks']} ({down} do not run: see `show`)"
    if row.get("cpu_source"):
        cells["cpu"] = f"{row['cpu']} % ({row['cpu_source']})"
    if row.get("memory_source"):
        cells["memory"] = f"{row['memory_mb']} MiB ({row['memory_source']})"
    return cells


def print_operations(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a line for each operation under way."""
    for row in rows:
        click.echo(plain(f"{row['topology']}: {operation_text(row)}"))


def print_answer(
    as_json: bool, document: Any, columns: str | Sequence[str], rows: Rows, title: str = ""
) -> None:
    """Print the document as JSON, or a table of its ``rows``."""
    if as_json:
        print_json(document)
    else:
        print_table(title, columns, rows)


_USUAL_SECS: Mapping[str, float] = {
    "zookeeper": 2,
    "supervisors": 4,
    "nimbus": 3,
    "dagster": 8,
    "spark": 10,
    "class data of Spark": 25,
    "describe": 1,
    "topology_conf": 1,
    "topology_code": 1,
    "assignment": 1,
    "active_topology": 1,
    "tasks": 3,
    "ending": 4,
}
"""Step -> its usual time on an idle machine with two cores, in seconds."""
_NAMED_SECS = 2.0
"""Time after which a running step is named where the output is not a terminal."""
_NAMED_AGAIN_SECS = 10.0
"""Time between two such lines."""


class Steps:
    """Progress of a call by its steps, on standard error; a context manager.

    It is printed once the call has lasted longer than a second. Steps may overlap. On a terminal
    the running steps are shown live. Elsewhere each step is a line when it ends. A line names the
    running steps when one of them has lasted for two seconds, and then every ten seconds. It has
    their usual time, if that is known.
    """

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title = title
        """Empty once it is printed."""
        self._quiet = quiet
        self._started = time.monotonic()
        self._last_end = self._started
        """Time when the last step ended."""
        self._running: dict[str, float] = {}
        """Running step -> its begin."""
        self._detail: dict[str, str] = {}
        """Running step -> its progress."""
        self._unprinted: list[str] = []
        """Lines of steps that ended in the first second."""
        self._lock = threading.Lock()
        """Guards all of these: steps end in threads of the caller, and ``_tick`` has its own."""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._live = sys.stderr.isatty()
        self._drawn = False
        """True while the terminal's last line shows the running steps."""

    def __enter__(self) -> "Steps":
        if not self._quiet:
            self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(2)
        with self._lock:
            self._clear()

    def begin(self, step: str) -> None:
        """Note that a step begins, unless it is running already."""
        with self._lock:
            self._running.setdefault(step, time.monotonic())

    def note(self, step: str, detail: str) -> None:
        """Set the progress of a running step."""
        self.begin(step)
        with self._lock:
            self._detail[step] = detail

    def done(self, step: str, outcome: str = "") -> None:
        """Print that a step has ended, with its seconds."""
        with self._lock:
            now = time.monotonic()
            # A step too short to be noticed took at most the time since the last one ended.
            began = self._running.pop(step, self._last_end)
            self._detail.pop(step, None)
            seconds = now - began
            self._last_end = now
            suffix = f"  {outcome}" if outcome else ""
            self._line(f"  {step:<28}{seconds:6.1f} s{suffix}")

    def on_step(self, step: str, state: str) -> None:
        """Progress callback of :mod:`storm_dagster.client`.

        ``state`` is a status of Dagster, or the progress of the step in words.
        """
        if state in ("SUCCESS", "FAILURE", "SKIPPED"):
            self.done(step, "" if state == "SUCCESS" else state.lower())
        elif state in ("STARTED", "STARTING", "IN_PROGRESS"):
            self.begin(step)
        else:
            self.note(step, state.lower() if state.isupper() else state)

    # -- drawing, always under the lock ------------------------------------------------------------
    def _clear(self) -> None:
        """Remove the line of the running steps, if it is shown."""
        if self._drawn:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._drawn = False

    def _line(self, text: str) -> None:
        """Print a line, but in the first second of the call keep it."""
        if self._quiet:
            return
        self._unprinted.append(plain(text))
        if time.monotonic() - self._started > 1.0:
            self._release()

    def _release(self) -> None:
        """Print the lines that were kept."""
        self._clear()
        if self._unprinted:
            self._print_title()
            click.echo("\n".join(self._unprinted), err=True)
            self._unprinted.clear()

    def _print_title(self) -> None:
        """Print the title of the steps, once."""
        if self._title:
            sys.stderr.write(plain(self._title) + "\n")
            self._title = ""

    def _running_steps(self) -> str:
        """The running steps in one line, with their seconds."""
        now = time.monotonic()
        parts: list[str] = []
        for step, began in self._running.items():
            detail = self._detail.get(step)
            name = f"{step} ({detail})" if detail else step
            usual_secs = _USUAL_SECS.get(step)
            usual = f" (usually {usual_secs:.0f} s)" if usual_secs is not None else ""
            parts.append(f"{name} {now - began:.0f} s{usual}")
        return plain(", ".join(parts))

    def _is_line_due(self, now: float, last_line: float) -> bool:
        """True if a line must name the running steps where the output is not a terminal.

        ``last_line``: time of the last such line.
        """
        for began in self._running.values():
            if began >= last_line and now - began >= _NAMED_SECS:
                return True
        return now - last_line >= _NAMED_AGAIN_SECS

    def _tick(self) -> None:
        """Body of the thread: show the running steps until the end."""
        last_line = self._started
        while not self._end.wait(0.2):
            now = time.monotonic()
            if now - self._started <= 1.0:
                continue
            with self._lock:
                self._release()
                if not self._running:
                    continue
                if self._live:
                    click.echo(f"\r\x1b[K  ... {self._running_steps()[:110]}", err=True, nl=False)
                    self._drawn = True
                elif self._is_line_due(now, last_line):
                    last_line = now
                    self._print_title()
                    click.echo(f"  ... {self._running_steps()}", err=True)


def utc_time(secs: float) -> str:
    """ISO form of epoch seconds, in UTC; ``?`` for a time beyond the calendar."""
    try:
        return datetime.datetime.fromtimestamp(secs, datetime.timezone.utc).isoformat()
    except (OverflowError, ValueError, OSError):
        return "?"  # A worker writes the times of its errors and dead letters.
