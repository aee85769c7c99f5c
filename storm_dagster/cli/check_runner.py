"""Checks that run side by side, each with a deadline."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from storm_dagster.model.errors import StormDagsterError, typed_error_text
from storm_dagster.operations.read.exposures import HealthResult

Check = Callable[[], Iterator[HealthResult]]


class _Event(NamedTuple):
    """A result of a check; ``None`` for its end."""

    check: str
    result: HealthResult | None


def run_checks(
    checks: Mapping[str, Check], deadlines_secs: Mapping[str, float], default_secs: float
) -> Iterator[tuple[str, HealthResult] | None]:
    """Run all checks at the same time, and yield (check, result) as they come.

    ``None`` is yielded after each second without a result. An error of a check is its last result,
    and so is its deadline: ``deadlines_secs``, else ``default_secs``. The threads of checks that
    are late are left behind, and end with the process.
    """
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    began = time.monotonic()
    pending: dict[str, float] = {}
    for name, check in checks.items():
        pending[name] = deadlines_secs.get(name, default_secs)
        thread = threading.Thread(target=_run, args=(name, check, events), name=name, daemon=True)
        thread.start()
    while pending:
        elapsed = time.monotonic() - began
        first_deadline = min(pending.values())
        try:
            event = events.get(timeout=min(1.0, max(0.01, first_deadline - elapsed)))
        except queue.Empty:
            yield None
        else:
            if event.check not in pending:
                continue
            if event.result is None:
                del pending[event.check]
            else:
                yield event.check, event.result
        elapsed = time.monotonic() - began
        for name, deadline in list(pending.items()):
            if elapsed >= deadline and events.empty():
                del pending[name]
                yield name, _late(deadline)


def _run(name: str, check: Check, events: "queue.SimpleQueue[_Event]") -> None:
    """Body of a check's thread."""
    try:
        for result in check():
            events.put(_Event(name, result))
    except StormDagsterError as error:
        events.put(_Event(name, ("broken", error.message, "fix what it names")))
    except Exception as error:
        text = f"the check failed: {typed_error_text(error)}"
        events.put(_Event(name, ("broken", text, "report this error with the log")))
    finally:
        events.put(_Event(name, None))


def _late(deadline_secs: float) -> HealthResult:
    return (
        "broken",
        f"no answer within {deadline_secs:g} s: the rest of this check was not done",
        "see whether its process and its host respond, and run doctor again",
    )
