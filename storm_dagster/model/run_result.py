"""Result of a verb's Dagster run, as tags of the run.

The run writes them; nimbus reads them for ``GET /v1/runs/ID``, from which the command line has
them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

OUTCOME_TAG = "storm/outcome"
"""Run tag: what became of the topology, such as ``rebalanced`` or ``unchanged``."""
MOVED_TAG = "storm/moved_tasks"
"""Run tag: number of tasks that moved to another slot."""
SUMMARY_TAG = "storm/summary"
"""Run tag: a sentence about the outcome, for people."""
WARNINGS_TAG = "storm/warnings"
"""Run tag: a JSON list of warnings about the submitted conf."""
_MAX_WARNINGS = 20
_MAX_CHARS = 300
"""Bounds of a tag with warnings: their number, and the characters of each."""


@dataclass(frozen=True)
class RunResult:
    """Outcome of a verb."""

    outcome: str | None = None
    """``None``: not known, for example of a run of an earlier release."""
    moved: int | None = None
    """Number of tasks that moved; ``None``: not known."""
    summary: str = ""
    """A sentence for people; empty if the outcome says everything."""
    warnings: tuple[str, ...] = ()
    """Warnings about the submitted conf, such as keys without an effect."""

    def to_tags(self) -> dict[str, str]:
        """The run tags; fields that are not known have none."""
        tags: dict[str, str] = {}
        if self.outcome is not None:
            tags[OUTCOME_TAG] = self.outcome
        if self.moved is not None:
            tags[MOVED_TAG] = str(self.moved)
        if self.summary:
            tags[SUMMARY_TAG] = self.summary
        if self.warnings:
            tags[WARNINGS_TAG] = json.dumps(_bounded(self.warnings))
        return tags

    def with_warnings(self, warnings: Sequence[str]) -> "RunResult":
        """The result with these warnings, too; those that it has are not repeated."""
        cut_warnings = [text[:_MAX_CHARS] for text in warnings]
        all_warnings = dict.fromkeys((*self.warnings, *cut_warnings))
        return replace(self, warnings=tuple(all_warnings))

    @staticmethod
    def of_tags(tags: Mapping[str, str]) -> "RunResult":
        """The result in the tags of a run, which users can change."""
        outcome = tags.get(OUTCOME_TAG)
        # A run that rebalance_schedule launched has the planned number from its begin.
        moved = tags.get(MOVED_TAG, "") if outcome is not None else ""
        return RunResult(
            outcome=outcome,
            moved=int(moved) if moved.isascii() and moved.isdigit() else None,
            summary=tags.get(SUMMARY_TAG, ""),
            warnings=_warnings_of(tags.get(WARNINGS_TAG, "[]")),
        )

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> "RunResult":
        """The result in a document with the keys of :meth:`to_document`, which it may lack."""
        moved = document.get("moved")
        return RunResult(
            outcome=document.get("outcome"),
            moved=moved if isinstance(moved, int) else None,
            summary=str(document.get("summary") or ""),
            warnings=tuple(document.get("warnings") or ()),
        )

    def to_document(self) -> dict[str, Any]:
        """The keys of a run's document and of the command line's."""
        return {
            "outcome": self.outcome,
            "moved": self.moved,
            "summary": self.summary,
            "warnings": list(self.warnings),
        }


def _bounded(warnings: Sequence[str]) -> list[str]:
    """The first warnings, each cut; the last entry counts the others."""
    texts = [text[:_MAX_CHARS] for text in warnings[:_MAX_WARNINGS]]
    if len(warnings) > _MAX_WARNINGS:
        texts.append(f"and {len(warnings) - _MAX_WARNINGS} more: see the log of the run")
    return texts


def _warnings_of(text: str) -> tuple[str, ...]:
    try:
        values = json.loads(text)
    except ValueError:
        return ()
    if not isinstance(values, list):
        return ()
    return tuple(value for value in values if isinstance(value, str))
