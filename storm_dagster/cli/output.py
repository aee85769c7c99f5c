"""Output of a verb: one JSON document or tables on standard output, progress on standard error."""

import json
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from storm_dagster.model.operation_text import operation_text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# JSON itself escapes those below.
_ESCAPED = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


def plain(text: object) -> str:
    """Text that cannot drive the terminal: control characters, escapes included, become ``?``."""
    return _CONTROL.sub("?", str(text))


def print_json(document: Any) -> None:
    """The one JSON document of a verb; nothing in it drives the terminal."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, default=str).translate(_ESCAPED))


def say(as_json: bool, document: Any, text: str) -> None:
    """The document as JSON, or one line that says the same."""
    if as_json:
        print_json(document)
    else:
        click.echo(text)


def notify(text: str) -> None:
    """Print one line on standard error."""
    click.echo(plain(text), err=True)


def human_seconds(seconds: float | None) -> str:
    """``75`` as ``1m 15s``; ``-`` for nothing."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (secs, "s")]
    shown = [f"{value}{unit}" for value, unit in parts if value]
    return " ".join(shown[:2]) or "0s"


Rows = Iterable[Mapping[str, Any] | Sequence[object]]


def _cell(row: Mapping[str, Any], column: str) -> object:
    """The value of a row of a document as a table shows it; ``None`` when it has none."""
    if column == "uptime":
        return human_seconds(row.get("uptime_secs"))
    if column == "host:port":
        return f"{row['host']}:{row['port']}" if row.get("port") else None
    value = row.get(column)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or None
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.2f}"
    return value


def print_table(title: str, columns: str | Sequence[str], rows: Rows) -> None:
    """A table on standard output; cells are text, never markup.

    ``columns`` are names, also in one text; ``shown=key`` shows another name than the key of the
    rows that are maps.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if title:
        sys.stdout.write(plain(title) + "\n")
    names = columns.split() if isinstance(columns, str) else columns
    named = [(shown, key or shown) for shown, _, key in (column.partition("=") for column in names)]
    table = Table(show_edge=False, show_header=any(columns))
    for shown, _ in named:
        table.add_column(shown, overflow="fold")
    for row in rows:
        cells = [_cell(row, key) for _, key in named] if isinstance(row, Mapping) else row
        table.add_row(*(Text(plain("-" if cell is None else cell)) for cell in cells))
    # Piped output is not cut at 80 columns.
    sys.stdout.flush()
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def row_for_table(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the cluster's or the topologies' list, with the columns that only people see."""
    columns = dict(row)
    columns["role"] = "leader" if row.get("leader") else "follower"
    down = row.get("not_running")
    if down:
        columns["tasks"] = f"{row['tasks']} ({down} do not run: see `show`)"
    return columns


def print_operations(rows: Iterable[Mapping[str, Any]]) -> None:
    """A line for each operation under way."""
    for row in rows:
        click.echo(plain(f"{row['topology']}: {operation_text(row)}"))


def print_answer(
    as_json: bool, document: Any, columns: str | Sequence[str], rows: Rows, title: str = ""
) -> None:
    """The document as JSON, or a table of the ``rows`` that are made of it."""
    if as_json:
        print_json(document)
    else:
        print_table(title, columns, rows)


class Steps:
    """Progress by step with its seconds, on standard error, once the whole lasts longer than a
    second.

    Steps may overlap. On a terminal the running ones are shown live; elsewhere each is a line when
    it ends, and a line names what is waited for every ten seconds. Use as a context manager.
    """

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what = what
        self._quiet = quiet
        self._started = self._last = time.monotonic()
        self._running: dict[str, float] = {}
        self._detail: dict[str, str] = {}
        self._held: list[str] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._live = sys.stderr.isatty()
        self._drawn = False

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
        """A step begins (again)."""
        with self._lock:
            self._running.setdefault(step, time.monotonic())

    def note(self, step: str, detail: str) -> None:
        """Set the progress of a running step."""
        self.begin(step)
        with self._lock:
            self._detail[step] = detail

    def done(self, step: str, outcome: str = "") -> None:
        """A step has ended."""
        with self._lock:
            now = time.monotonic()
            # A step too short to be seen running took at most the time since the last one ended.
            began = self._running.pop(step, self._last)
            self._detail.pop(step, None)
            seconds, self._last = now - began, now
            self._line(f"  {step:<28}{seconds:6.1f} s{'  ' + outcome if outcome else ''}")

    def on_step(self, step: str, state: str) -> None:
        """Progress callback of :mod:`storm_dagster.client`."""
        if state in ("SUCCESS", "FAILURE", "SKIPPED"):
            self.done(step, "" if state == "SUCCESS" else state.lower())
        elif state in ("STARTED", "STARTING", "IN_PROGRESS"):
            self.begin(step)
        else:
            self.note(step, state.lower() if state.isupper() else state)

    # -- drawing, always under the lock ------------------------------------------------------------
    def _clear(self) -> None:
        if self._drawn:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._drawn = False

    def _line(self, text: str) -> None:
        if self._quiet:
            return
        self._held.append(plain(text))
        if time.monotonic() - self._started > 1.0:
            self._release()

    def _release(self) -> None:
        self._clear()
        if self._held:
            self._name()
            click.echo("\n".join(self._held), err=True)
            self._held.clear()

    def _name(self) -> None:
        """Say once what these are the steps of."""
        if self._what:
            sys.stderr.write(plain(self._what) + "\n")
            self._what = ""

    def _now(self) -> str:
        parts = []
        for step, began in self._running.items():
            detail = self._detail.get(step)
            parts.append(
                f"{step}{' (' + detail + ')' if detail else ''} {time.monotonic() - began:.0f} s"
            )
        return plain(", ".join(parts))

    def _tick(self) -> None:
        last_shown = self._started
        while not self._end.wait(0.2):
            now = time.monotonic()
            if now - self._started <= 1.0:
                continue
            with self._lock:
                self._release()
                if not self._running:
                    continue
                if self._live:
                    click.echo(f"\r\x1b[K  ... {self._now()[:110]}", err=True, nl=False)
                    self._drawn = True
                elif now - last_shown >= 10.0:
                    last_shown = now
                    self._name()
                    click.echo(f"  ... {self._now()}", err=True)
