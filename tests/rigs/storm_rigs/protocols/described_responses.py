"""Comparison of JSON responses with the descriptions of their routes in ``/openapi.json``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema_rs


@dataclass(frozen=True)
class _DescribedPath:
    """A path of the description, such as ``/v1/runs/{id}``."""

    pattern: re.Pattern[str]
    literal_size: int
    """Characters of the path without its parameters."""
    operations: dict[str, Any]


class DescribedResponses:
    """Check of responses, for the hooks of a client of the service.

    A good JSON response must have the form that its route describes for its status.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        """``document`` is ``/openapi.json`` of the service."""
        self._components = document["components"]
        self._paths = [
            _described_path(path, operations) for path, operations in document["paths"].items()
        ]

    def check(self, response: httpx.Response) -> None:
        """Assert that the response is as described; pages and errors are not compared."""
        request = response.request
        is_json = response.headers.get("content-type") == "application/json"
        if not is_json or not response.is_success or request.url.path == "/openapi.json":
            return
        operation = self._operation(request)
        described = operation["responses"][str(response.status_code)]
        schema = described["content"]["application/json"]["schema"]
        response.read()
        validator = jsonschema_rs.validator_for({**schema, "components": self._components})
        problems = [
            f"{list(error.instance_path)}: {error.message:.300}"
            for error in validator.iter_errors(response.json())
        ]
        assert not problems, f"{request.method} {request.url}: {problems[:5]}"

    def _operation(self, request: httpx.Request) -> dict[str, Any]:
        """Description of the route that handles a request: the one with the most literal text."""
        raw_path = request.url.raw_path.decode("ascii").partition("?")[0]
        fitting = [path for path in self._paths if path.pattern.fullmatch(raw_path)]
        fitting = [path for path in fitting if request.method.lower() in path.operations]
        assert fitting, f"{request.method} {raw_path} is not described"
        path = max(fitting, key=lambda path: path.literal_size)
        operation: dict[str, Any] = path.operations[request.method.lower()]
        return operation


def _described_path(path: str, operations: dict[str, Any]) -> _DescribedPath:
    """A path with the pattern of its requests; a component's id may have a slash."""
    parts = re.split(r"\{\w+\}", path)
    pattern = re.compile(".+".join(re.escape(part) for part in parts))
    return _DescribedPath(pattern, sum(len(part) for part in parts), operations)
