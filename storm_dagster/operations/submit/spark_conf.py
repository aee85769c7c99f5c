"""Check of ``topology.spark.conf`` by the Spark server that will run the components."""

from typing import Any

from storm_dagster.core.submission.spark_keys import connect_url, keys_without_references
from storm_dagster.model.conf import Conf
from storm_dagster.model.conf_layers import merge_conf
from storm_dagster.model.errors import InvalidTopology, Unavailable
from storm_dagster.model.fusion import is_spark_component
from storm_dagster.model.topology import TopologySpec
from storm_dagster.operations.context import OperationsContext
from storm_dagster.spark.session_keys import KeysResult, string_keys


def check_session_keys(ctx: OperationsContext, total: Conf, spec: TopologySpec) -> tuple[str, ...]:
    """Check the keys of each Spark component by its server; return warnings.

    Raises :class:`InvalidTopology` for a key that the server refuses. A server that does not answer
    in time is not waited for: its components report the keys when they open the session.
    """
    warnings: list[str] = []
    asked: set[tuple[Any, ...]] = set()
    for component_id, kind, part in spec.components():
        conf = merge_conf({"total": total, "component": part.conf})
        keys = keys_without_references(string_keys(conf.get("topology.spark.conf")))
        url = connect_url(conf)
        question = (url, tuple(sorted(keys.items())))
        if url is None or not keys or not is_spark_component(part) or question in asked:
            continue
        asked.add(question)
        result = _ask(ctx, url, keys)
        place = f"{kind} {component_id!r}: topology.spark.conf"
        if result.refused:
            raise InvalidTopology(f"{place}: {'; '.join(result.refused)}")
        warnings += [f"{place}: {sentence}" for sentence in result.misspelled]
    return tuple(warnings)


def _ask(ctx: OperationsContext, url: str, keys: dict[str, str]) -> KeysResult:
    """The server's result for the keys; empty if it does not respond in time."""
    try:
        return ctx.spark_keys(url, keys)
    except Unavailable as error:
        ctx.log.info(
            "topology.spark.conf is not checked now, components report its errors: %s",
            error.message,
        )
        return KeysResult()
