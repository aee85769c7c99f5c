"""Lists that name every error and every persistent node."""

from __future__ import annotations

import inspect

import pytest

from storm_dagster.model import errors, paths
from storm_dagster.model.errors import ERRORS, StormDagsterError, error_from_document


def test_the_list_of_errors_has_every_type() -> None:
    types = [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, StormDagsterError)
    ]
    assert set(errors.ERRORS) == set(types)
    assert len(errors.ERRORS) == len(types)


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_is_read_from_its_document(cls: type[StormDagsterError]) -> None:
    document = {"error": {"type": cls.__name__, "message": "reason"}}
    assert type(error_from_document(document)) is cls


def test_every_first_level_path_is_created_with_the_root_or_by_its_writer() -> None:
    constants = [
        value for name, value in vars(paths).items() if name.isupper() and isinstance(value, str)
    ]
    by_writers = {
        paths.CLUSTER_ID,
        paths.HEALER,
        paths.HEALING_PAUSE,
        paths.NIMBUS_MASTER,
        paths.DEPLOYS,
        paths.EVENTS,
        paths.ACCESS_TOKENS,
    }
    assert set(paths.FIRST_LEVEL) == set(constants) - by_writers
    assert len(set(paths.FIRST_LEVEL)) == len(paths.FIRST_LEVEL)
