"""Display of ``storm-dagster run``: a live table, lines, or JSON documents."""

import json
import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import click

from storm_dagster.cli.output import plain, print_table
from storm_dagster.local.report import ComponentRow, RunReport

_COLUMNS = (
    "component",
    "tasks",
    "emitted",
    "emitted/s",
    "executed",
    "executed/s",
    "failed",
    "errors",
    "waiting",
    "p50 ms",
    "p99 ms",
)
_LINE_SECS = 5.0
"""Seconds between two lines where the output is not a terminal; the first ones come sooner."""


class Display(Protocol):
    """Output of a run. Its methods may be called by any thread."""

    def line(self, text: str) -> None:
        """Print a line that stays: a report to Dagster, an error."""
        ...

    def show(self, report: RunReport) -> None:
        """Show the state of the run."""
        ...

    def close(self, report: RunReport | None) -> None:
        """End the display with the last report; ``None`` if the run did not begin."""
        ...


class JsonDisplay:
    """One JSON document in a line for each report; further lines are on standard error."""

    def line(self, text: str) -> None:
        """Print the line on standard error."""
        click.echo(plain(text), err=True)

    def show(self, report: RunReport) -> None:
        """Print the report as one line."""
        sys.stdout.write(json.dumps(report.to_document(), ensure_ascii=True) + "\n")
        sys.stdout.flush()

    def close(self, report: RunReport | None) -> None:
        """Print the last report."""
        if report is not None:
            self.show(report)


class LineDisplay:
    """A line for each report, for output that is not a terminal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_secs = 0.0
        """Age of the run at which the next line is due."""

    def line(self, text: str) -> None:
        """Print the line."""
        with self._lock:
            click.echo(plain(text))

    def show(self, report: RunReport) -> None:
        """Print what each component has emitted or executed, if a line is due."""
        if report.seconds < self._next_secs:
            return
        self._next_secs = report.seconds + min(_LINE_SECS, max(1.0, report.seconds))
        self.line(_one_line(report))

    def close(self, report: RunReport | None) -> None:
        """Print the last tuples, the table, and the reason for the end."""
        if report is not None:
            for text in _last_lines(report):
                self.line(text)
            print_table("", _COLUMNS, [_cells(row) for row in report.rows])
            self.line(_summary(report))


class LiveDisplay:
    """A table on a terminal that is drawn with each report."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def line(self, text: str) -> None:
        """Print the line above the table."""
        self._console.print(plain(text), markup=False, highlight=False)

    def show(self, report: RunReport) -> None:
        """Draw the table and the last tuples."""
        from rich.console import Group
        from rich.text import Text

        texts = [Text(plain(text)) for text in (_heading(report), *_last_lines(report))]
        self._live.update(Group(texts[0], _rich_table(report), *texts[1:]), refresh=True)

    def close(self, report: RunReport | None) -> None:
        """Replace the live table by the last one, which stays."""
        self._live.stop()
        if report is not None:
            self._console.print(_rich_table(report))
            for text in (*_last_lines(report), _summary(report)):
                self.line(text)


def make_display(as_json: bool) -> Display:
    """Return the display for this output."""
    if as_json:
        return JsonDisplay()
    if sys.stdout.isatty():
        return LiveDisplay()
    return LineDisplay()


def _rich_table(report: RunReport) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "component" else "right")
    for row in report.rows:
        table.add_row(*(Text(plain(cell)) for cell in _cells(row)))
    return table


def _cells(row: ComponentRow) -> list[str]:
    """Return the cells of a component, in the order of the columns."""
    counts = row.counts
    tasks = str(counts.tasks)
    if counts.running < counts.tasks:
        tasks = f"{counts.running} of {counts.tasks}"
    executed = ["-", "-"]
    if counts.kind == "bolt":
        executed = [f"{counts.executed:,}", f"{row.executed_per_sec:,.0f}"]
    return [
        row.component,
        tasks,
        f"{counts.emitted:,}",
        f"{row.emitted_per_sec:,.0f}",
        *executed,
        f"{counts.failed:,}",
        f"{counts.errors:,}",
        f"{counts.waiting:,}",
        _milliseconds(row.latency, "p50_ms"),
        _milliseconds(row.latency, "p99_ms"),
    ]


def _milliseconds(latency: Mapping[str, float], name: str) -> str:
    if name not in latency:
        return "-"
    value = latency[name]
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _heading(report: RunReport) -> str:
    state = "starting" if report.is_starting else "running"
    return f"{report.topology}: {state}, {report.seconds:.0f} s (Ctrl-C ends it)"


def _one_line(report: RunReport) -> str:
    parts: list[str] = []
    for row in report.rows:
        if row.counts.running < row.counts.tasks:
            parts.append(f"{row.component} starts")
        elif row.counts.kind == "spout":
            parts.append(f"{row.component} {row.counts.emitted:,} ({row.emitted_per_sec:,.0f}/s)")
        else:
            parts.append(f"{row.component} {row.counts.executed:,} ({row.executed_per_sec:,.0f}/s)")
    failed = sum(row.counts.failed for row in report.rows if row.counts.kind == "spout")
    if failed:
        parts.append(f"{failed:,} failed")
    if report.errors:
        parts.append(f"{report.errors:,} errors")
    return f"[{report.seconds:5.1f} s] {', '.join(parts)}"


def _last_lines(report: RunReport) -> list[str]:
    """Return the last tuples of the shown components, one line each."""
    lines: list[str] = []
    for component, tuples in report.last.items():
        for tup in tuples:
            values = ", ".join(str(value) for value in tup["values"])
            origin = ""
            if tup["component"] != component:
                origin = f" <- {tup['component']}"
            elif tup["stream"] != "default":
                origin = f" on {tup['stream']}"
            lines.append(f"  {component}{origin}: {values:.200}")
    return lines


def _summary(report: RunReport) -> str:
    emitted = sum(row.counts.emitted for row in report.rows if row.counts.kind == "spout")
    failed = sum(row.counts.failed for row in report.rows if row.counts.kind == "spout")
    events = f", {report.events:,} reports to Dagster" if report.events else ""
    return (
        f"{report.topology} ended after {report.seconds:.1f} s ({report.end}): {emitted:,} tuples "
        f"of spouts, {failed:,} failed, {report.errors:,} errors{events}"
    )
