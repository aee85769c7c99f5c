"""Lists that name every constant or class of their module."""

from __future__ import annotations

import pytest

from storm_dagster.model import errors, paths
from storm_dagster.model.errors import StormDagsterError, error_from_document

NOT_CREATED = {paths.CLUSTER_ID, paths.HEALER, paths.NIMBUS_MASTER, paths.DEPLOYS}
"""Nodes that are ephemeral, or mark that the others are complete."""


def test_the_first_level_has_every_path_that_is_created_with_the_root() -> None:
    constants = {
        value for name, value in vars(paths).items() if name.isupper() and isinstance(value, str)
    }
    assert set(paths.FIRST_LEVEL) == constants - NOT_CREATED
    assert len(paths.FIRST_LEVEL) == len(set(paths.FIRST_LEVEL))


@pytest.mark.parametrize(
    "cls",
    [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, StormDagsterError)
    ],
)
def test_every_error_is_read_from_its_document(cls: type[StormDagsterError]) -> None:
    document = {"error": {"type": cls.__name__, "message": "reason"}}
    assert type(error_from_document(document)) is cls
