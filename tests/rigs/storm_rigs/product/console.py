"""Console blocks of the documents: each command with the output that is shown for it, and how real
output is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ANYTHING = "..."
"""A line of a document that stands for any number of lines, none included."""

SILENT = ("cd", "kill", "python3", "sed", "sleep", "source")
"""Programs that print nothing when they succeed."""

_BLOCK = re.compile(r"^```console\n(.*?)^```", flags=re.S | re.M)


@dataclass(frozen=True)
class ConsoleCommand:
    """One ``$`` line of a console block."""

    page: str
    line: int
    command: str
    """Without the comment behind it; lines that end with a backslash are joined."""
    output: tuple[str, ...]

    @property
    def program(self) -> str:
        """First word of the command."""
        return self.command.split()[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.command}"


def console_commands(page: Path) -> list[ConsoleCommand]:
    """The commands of a page in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        command
        for block in _BLOCK.finditer(text)
        for command in _of_block(
            page.name, text.count("\n", 0, block.start(1)) + 1, block[1].splitlines()
        )
    ]


def _of_block(page: str, first: int, lines: Sequence[str]) -> Iterator[ConsoleCommand]:
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        typed, *output = lines[start:end]
        command = typed.removeprefix("$ ")
        while command.endswith("\\"):
            command = command[:-1] + output.pop(0).lstrip("> ")
        while output and not output[-1].strip():
            output.pop()
        yield ConsoleCommand(page, first + start, command.split("  #")[0].strip(), tuple(output))


_RULE = re.compile(r"[\s━─╇┿┷┯┼┃│]+")
_PLACEHOLDERS = (
    # A topology's id, and the version of its code, which is the id with a number behind it.
    (re.compile(r"\b([A-Za-z][\w-]*?)-\d+-\d{10}\.\d+\b"), r"\1-ID.VERSION"),
    (re.compile(r"\b([A-Za-z][\w-]*?)-\d+-\d{10}\b"), r"\1-ID"),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "ID"),
    # What `show` says of a worker's code.
    (re.compile(r"\b[0-9a-f]{16}\b"), "VERSION"),
    (re.compile(r"(?<![\w:./-])/[\w./-]+"), "PATH"),
    (re.compile(r"\b\d+[dhms](?: \d+[dhms])*\b"), "N s"),
    (re.compile(r"\d+(?:[.,]\d+)*"), "N"),
    (re.compile(r"\bN(?:, N)+\b"), "N"),
    # A table's cell without a figure yet.
    (re.compile(r"(?<=[│┃]) *- *(?=[│┃]|$)"), " N "),
    (re.compile(r" +"), " "),
)


def normalize(line: str) -> str:
    """The line with placeholders for what differs from run to run: paths, ids, times, ports, pids,
    numbers, widths.
    """
    if line and _RULE.fullmatch(line):
        return "rule" if line.strip() else ""
    for pattern, placeholder in _PLACEHOLDERS:
        line = pattern.sub(placeholder, line)
    return line.strip()


def difference(shown: Sequence[str], printed: Sequence[str]) -> str | None:
    """The first part of the shown output that real output lacks; ``None`` when they agree."""
    real = [normalize(line) for line in printed]
    parts: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == ANYTHING:
            parts.append([])
        else:
            parts[-1].append(line)
    position = 0
    for number, part in enumerate(parts):
        wanted = [normalize(line) for line in part]
        is_last = number == len(parts) - 1
        # The first part stands at the beginning, the last one at the end, the others anywhere
        # between.
        last = len(real) - len(wanted)
        begin = max(position, last) if is_last else position
        ends = position if number == 0 else last
        found = next(
            (
                place
                for place in range(begin, ends + 1)
                if real[place : place + len(wanted)] == wanted
            ),
            None,
        )
        if found is None or (is_last and found != last):
            return "\n".join(["shown:", *part, "printed:", *printed[position:]])
        position = found + len(wanted)
    return None
