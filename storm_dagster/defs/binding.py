"""Binding of plain functions to one cluster: its names, and the keys of its resources."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import dagster as dg

from storm_dagster.defs.keys import GROUP, OWNER, catalog
from storm_dagster.defs.resources.handles import ClusterHandle
from storm_dagster.defs.resources.operating import Handles
from storm_dagster.model.dagster_names import DagsterNames, queue_tags


def bind(function: Callable[..., Any], names: DagsterNames) -> Callable[..., Any]:
    """``function`` for one cluster, as Dagster's decorators take it.

    A parameter that is a resource of ours, such as ``zookeeper: ZooKeeperResource``, asks for the
    cluster's key (``storm_zookeeper``); one of type :class:`Handles` asks for the three that it
    holds; one of type :class:`DagsterNames` gets ``names`` and is hidden.
    """
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, parameter.annotation)
        if hint is DagsterNames:
            continue
        keys = {names.resource(key): kind for key, kind in _resources(name, hint).items()} or {
            name: hint
        }
        shown += [parameter.replace(name=key, annotation=kind) for key, kind in keys.items()]

    def bound(*args: Any, **kwargs: Any) -> Any:
        for name, hint in hints.items():
            if found := {key: kwargs.pop(names.resource(key)) for key in _resources(name, hint)}:
                kwargs[name] = Handles(**found) if hint is Handles else found[name]
            elif hint is DagsterNames:
                kwargs[name] = names
        return function(*args, **kwargs)

    made: Any = bound
    made.__name__, made.__doc__, made.__module__ = (
        function.__name__,
        function.__doc__,
        function.__module__,
    )
    # Both: which of them is read depends on Dagster's release.
    made.__signature__ = signature.replace(parameters=shown)
    made.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return bound


def _resources(name: str, hint: Any) -> dict[str, type]:
    """Plain key -> type of the resources that a parameter stands for."""
    if hint is Handles:
        return typing.get_type_hints(Handles)
    return {name: hint} if isinstance(hint, type) and issubclass(hint, ClusterHandle) else {}


@functools.lru_cache(maxsize=128)
def op_job(
    names: DagsterNames, name: str, function: Callable[..., Any], description: str | None = None
) -> dg.JobDefinition:
    """The job ``name`` whose only op, ``name_op``, is ``function``; asked for twice, it is the same
    one.

    It runs in one process, whatever the executor of the project.
    """
    description = description or catalog()["jobs"][name]
    op = dg.op(name=names.name(f"{name}_op"), description=description, out=dg.Out(dg.Nothing))(
        bind(function, names)
    )

    @dg.job(
        name=names.name(name),
        description=description,
        executor_def=dg.in_process_executor,
        tags=queue_tags(name),
    )
    def job() -> None:
        op()

    return job


def cluster_key(names: DagsterNames, key: dg.AssetKey) -> dg.AssetKey:
    """The cluster's key for ``key``, one of :mod:`storm_dagster.defs.keys`."""
    return dg.AssetKey(list(names.asset_path(key.path)))


def sensor(
    names: DagsterNames, function: Callable[..., Any], status: dg.DefaultSensorStatus
) -> dg.SensorDefinition:
    """The sensor of the catalog that is called like ``function``."""
    name = function.__name__
    return dg.sensor(name=names.name(name), default_status=status, **catalog()["sensors"][name])(
        bind(function, names)
    )


def schedule(
    names: DagsterNames, function: Callable[..., Any], status: dg.DefaultScheduleStatus
) -> dg.ScheduleDefinition:
    """The schedule of the catalog that is called like ``function``."""
    row = dict(catalog()["schedules"][function.__name__])
    row |= {
        "name": names.name(function.__name__),
        "job_name": names.name(row["job_name"]),
        "default_status": status,
    }
    return dg.schedule(**row)(bind(function, names))


def asset_settings(names: DagsterNames, key: dg.AssetKey, table: str = "assets") -> dict[str, Any]:
    """What the catalog says of an asset, and what all assets of a cluster share."""
    row = catalog()[table][key.path[-1]]
    return {
        "key": cluster_key(names, key),
        "group_name": names.name("cluster" if "cluster" in key.path else GROUP),
        "kinds": {"storm", *row.get("kinds", ())},
        "owners": [OWNER],
        "description": row["description"],
    }
