"""The text that answers ``cmd=jstack``: a header for each worker process, then its threads' stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def stacks_text(header: str, stacks: Mapping[str, Sequence[str]] | None, problem: str = "") -> str:
    """One worker's block; ``problem`` is the reason for no stacks."""
    lines = ["=" * 80, header, "=" * 80]
    if stacks is None:
        return "\n".join([*lines, problem, ""]) + "\n"
    for thread, frames in stacks.items():
        lines.append(f'"{thread}"')
        lines.extend(frame.rstrip("\n") for frame in frames)
        lines.append("")
    return "\n".join(lines) + "\n"
