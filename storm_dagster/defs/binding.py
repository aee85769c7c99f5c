"""Binding of functions to one cluster: its names and its resources' keys."""

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
from storm_dagster.model.errors import InvalidRequest

_MAX_INTERVAL_SECS = 3600
"""Longest time between two ticks of a sensor that can be configured."""


def bind(function: Callable[..., Any], names: DagsterNames) -> Callable[..., Any]:
    """Bind ``function`` to one cluster, for Dagster's decorators.

    A parameter that is one of this package's resources, such as ``zookeeper: ZooKeeperResource``,
    becomes the cluster's key (``storm_zookeeper``). One of type :class:`Handles` becomes the keys
    of its three resources. One of type :class:`DagsterNames` gets ``names`` and is hidden. The
    result has the name and the docstring of ``function``, and the changed signature.
    """
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, parameter.annotation)
        if hint is DagsterNames:
            continue
        resources = _resources(name, hint)
        if not resources:
            parameters.append(parameter.replace(annotation=hint))
        for key, kind in resources.items():
            parameters.append(parameter.replace(name=names.resource(key), annotation=kind))

    def bound(*args: Any, **kwargs: Any) -> Any:
        # Dagster passes resources by the names in the changed signature.
        for name, hint in hints.items():
            if hint is DagsterNames:
                kwargs[name] = names
                continue
            resources = {key: kwargs.pop(names.resource(key)) for key in _resources(name, hint)}
            if hint is Handles:
                kwargs[name] = Handles(**resources)
            elif resources:
                kwargs[name] = resources[name]
        return function(*args, **kwargs)

    attributes: Any = bound
    attributes.__name__ = function.__name__
    attributes.__doc__ = function.__doc__
    attributes.__module__ = function.__module__
    # Both are set, because Dagster's releases differ in which of them they read.
    attributes.__signature__ = signature.replace(parameters=parameters)
    attributes.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return bound


def _resources(name: str, hint: Any) -> dict[str, type]:
    """Key -> type of the resources that a parameter needs; empty without one.

    The keys are those of a cluster without a name and a prefix.
    """
    if hint is Handles:
        return typing.get_type_hints(Handles)
    if isinstance(hint, type) and issubclass(hint, ClusterHandle):
        return {name: hint}
    return {}


@functools.lru_cache(maxsize=128)
def op_job(
    names: DagsterNames, name: str, function: Callable[..., Any], description: str | None = None
) -> dg.JobDefinition:
    """The job ``name`` whose only op, ``name_op``, is ``function``.

    Equal calls return the same job. It runs in one process with any executor of the project.
    """
    description = description or catalog()["jobs"][name]
    decorate = dg.op(name=names.name(f"{name}_op"), description=description, out=dg.Out(dg.Nothing))
    op = decorate(bind(function, names))

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


def check_interval(interval_secs: float) -> None:
    """Check the least time between two ticks of a sensor; :class:`InvalidRequest`."""
    if not 1 <= interval_secs <= _MAX_INTERVAL_SECS:
        raise InvalidRequest(
            f"an interval of sensors of {interval_secs} s: choose 1 to {_MAX_INTERVAL_SECS} s"
        )


def sensor(
    names: DagsterNames,
    function: Callable[..., Any],
    status: dg.DefaultSensorStatus,
    interval_secs: int = 1,
) -> dg.SensorDefinition:
    """The sensor of the catalog with the name of ``function``.

    Its ticks are at least ``interval_secs`` apart, and at least as far as in the catalog.
    """
    name = function.__name__
    settings = dict(catalog()["sensors"][name])
    least_secs = settings["minimum_interval_seconds"]
    settings["minimum_interval_seconds"] = max(least_secs, interval_secs)
    decorate = dg.sensor(name=names.name(name), default_status=status, **settings)
    return decorate(bind(function, names))


def schedule(
    names: DagsterNames, function: Callable[..., Any], status: dg.DefaultScheduleStatus
) -> dg.ScheduleDefinition:
    """The schedule of the catalog with the name of ``function``."""
    settings = dict(catalog()["schedules"][function.__name__])
    settings["name"] = names.name(function.__name__)
    settings["job_name"] = names.name(settings["job_name"])
    settings["default_status"] = status
    return dg.schedule(**settings)(bind(function, names))


def asset_settings(names: DagsterNames, key: dg.AssetKey, table: str = "assets") -> dict[str, Any]:
    """The catalog's settings of an asset, and those that a cluster's assets share.

    ``table`` is that of the catalog: ``assets`` (stages) or ``external`` (daemons).
    """
    row = catalog()[table][key.path[-1]]
    return {
        "key": cluster_key(names, key),
        "group_name": names.name("cluster" if "cluster" in key.path else GROUP),
        "kinds": {"storm", *row.get("kinds", ())},
        "owners": [OWNER],
        "description": row["description"],
    }
