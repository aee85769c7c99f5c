"""Detection of failures of Dagster's own storage in its responses, which look like any other failure."""

from __future__ import annotations

import re
from typing import Any

STORAGE_REMEDY = (
    "start the database that `storage` in dagster.yaml names (without one: fix the folder DAGSTER_HOME). "
    "Topologies run on meanwhile, and kill, activate and deactivate work"
)
_SIGNS = re.compile(
    r"sqlalchemy\.exc\.|psycopg2?\.|sqlite3\.|pymysql\.|\((?:psycopg2?|sqlite3|pymysql)[.\w]*\)|DagsterPostgresException"
    r"|DagsterMySQLException|(?:Operational|Interface|Database)Error"
)
_BACKGROUND = re.compile(r"\(Background on this error at: \S+\)|\[SQL:.*", re.S)
_LONGEST = 300


def storage_problem(answer: Any) -> str | None:
    """The database's words in an answer (or text) of Dagster; ``None`` when it is not about storage."""
    for text in _texts(answer):
        if _SIGNS.search(text):
            words = " ".join(_BACKGROUND.sub("", text).split())
            return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
    return None


def _texts(answer: Any) -> list[str]:
    """Every message in the response, the deepest causes last."""
    if isinstance(answer, str):
        return [answer]
    if isinstance(answer, list):
        return [text for part in answer for text in _texts(part)]
    if isinstance(answer, dict):
        return [
            text
            for key, part in answer.items()
            if key != "stack" and (isinstance(part, dict | list) or key in ("message", "className"))
            for text in _texts(part)
        ]
    return []
