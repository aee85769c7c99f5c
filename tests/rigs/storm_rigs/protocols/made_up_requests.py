"""Requests that schemathesis makes up for described routes. Importing it takes seconds: only who
asks does.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import hypothesis
import hypothesis.errors
import hypothesis.strategies
import schemathesis
from hypothesis.strategies import SearchStrategy
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

load_all_checks()
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
# Of 50 in `make test`: there are many routes.
EXAMPLES = {
    schemathesis.GenerationMode.POSITIVE: hypothesis.settings().max_examples // 25,
    schemathesis.GenerationMode.NEGATIVE: hypothesis.settings().max_examples // 50,
}
SETTINGS = hypothesis.settings(
    phases=[hypothesis.Phase.generate],
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),  # type: ignore[arg-type]
)


def fuzz(
    document: dict[str, Any], base_url: str, known: dict[str, Any], every: int = 1
) -> Counter[str]:
    """Send made-up requests to every route, or to one of so many, at least one valid request to
    each.

    ``known``: path parameters that mean something. Returns the number of requests of each route.
    """
    schema = schemathesis.openapi.from_dict(document)
    sent: Counter[str] = Counter()
    for result in islice(schema.get_all_operations(), 0, None, every):
        assert isinstance(result, Ok), result
        operation = result.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            try:
                strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
            except Exception as error:
                assert mode is schemathesis.GenerationMode.NEGATIVE, f"{operation.label}: {error}"
                continue

            harmless = operation.method.upper() == "GET" or "activate" in operation.path
            sent[operation.label] += ask_many(strategy, base_url, known, harmless, EXAMPLES[mode])
        assert sent[operation.label] >= 1, f"{operation.label} was never asked"
    return sent


def ask_many(
    strategy: SearchStrategy[schemathesis.Case],
    base_url: str,
    known: dict[str, Any],
    harmless: bool,
    examples: int,
) -> int:
    asked = 0

    @hypothesis.settings(SETTINGS, max_examples=examples)
    @hypothesis.given(case=strategy, real=hypothesis.strategies.booleans())
    def ask(case: schemathesis.Case, real: bool) -> None:
        nonlocal asked
        for name, value in (case.path_parameters or {}).items():
            if harmless and real and name in known:
                case.path_parameters[name] = known[name]
            elif not harmless and value in known.values():
                # Hypothesis draws texts from the source of the tests too; what would end the
                # topology that others look at is asked about made-up ones only.
                case.path_parameters[name] = "made-up"
        response = case.call(base_url=base_url, timeout=30)
        asked += 1
        assert response.status_code < 500 or response.status_code == 503, response.text
        case.validate_response(response, checks=CHECKS)

    try:
        ask()
    except hypothesis.errors.Unsatisfiable:
        # Nothing can be wrong about a request that has neither parameters nor a body.
        assert asked == 0
    return asked
