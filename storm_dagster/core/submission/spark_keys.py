"""Check of the conf keys that choose the Spark of a topology's components."""

from collections.abc import Mapping

from storm_dagster.model.conf import Conf, mask_text
from storm_dagster.model.conf_layers import merge_conf
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.fusion import is_spark_component
from storm_dagster.model.topology import TopologySpec

MASTER = "spark.master"
REMOTES = ("topology.spark.remote", "spark.remote")
"""Keys of a Spark Connect server; the first that is set is used, before ``spark.master``."""
_SCHEME = "sc://"
_REFERENCE = "${"
"""Begin of a reference, which only the host of a task resolves: its value is not checked."""


def check_spark_keys(cluster: Conf, topology: Conf, spec: TopologySpec) -> None:
    """Check the keys of Spark in a topology's conf and those of its components.

    Raises :class:`InvalidTopology` for a URL that is not one of Spark Connect, and for a
    ``spark.master`` of the topology that another key of its conf or of the ``cluster``'s hides.
    ``topology`` is the topology's own conf. Without a Spark component only its own
    ``topology.spark.remote`` is checked, because its code may read the other keys.
    """
    _check_scheme("topology.spark.remote", topology, "the topology's conf")
    for component_id, kind, part in spec.components():
        if not is_spark_component(part):
            continue
        own = merge_conf({"author": topology, "component": part.conf})
        owner = f"{kind} {component_id!r}"
        for key in REMOTES:
            _check_scheme(key, own, owner)
        if own.get(MASTER):
            _check_master(cluster, own, owner)


def connect_url(conf: Conf) -> str | None:
    """URL of the Spark Connect server of a component's conf.

    ``None`` without one, and if only the host of a task knows it.
    """
    for key in REMOTES:
        if conf.get(key):
            url = str(conf[key])
            return None if _REFERENCE in url else url
    return None


def keys_without_references(keys: Mapping[str, str]) -> dict[str, str]:
    """The keys whose values are known before a task starts."""
    return {key: value for key, value in keys.items() if _REFERENCE not in value}


def _check_scheme(key: str, conf: Conf, owner: str) -> None:
    """Check that the URL under the key, if any, is one of Spark Connect."""
    url = conf.get(key)
    if not url or _REFERENCE in str(url) or str(url).startswith(_SCHEME):
        return
    raise InvalidTopology(
        f"{owner}: {key} is {mask_text(str(url))!r:.200}, which is not a Spark Connect URL: write "
        f"{_SCHEME}host:port, or use {MASTER} for spark://, yarn, k8s:// and local[N], with "
        f"{REMOTES[0]}: null and {REMOTES[1]}: null beside it"
    )


def _check_master(cluster: Conf, own: Conf, owner: str) -> None:
    """Check that ``spark.master`` of ``own`` is no Connect URL, and that no key hides it."""
    if str(own[MASTER]).startswith(_SCHEME):
        raise InvalidTopology(
            f"{owner}: {MASTER} is {mask_text(str(own[MASTER]))!r:.200}, which is a Spark Connect "
            f"URL: write it under {REMOTES[0]}"
        )
    for key in REMOTES:
        source = "the topology's" if key in own else "the cluster's"
        url = own[key] if key in own else cluster.get(key)
        if url:
            master = mask_text(str(own[MASTER]))
            raise InvalidTopology(
                f"{owner}: {MASTER} {master!r:.200} of the topology's conf has no effect beside "
                f"{key} {mask_text(str(url))!r:.200} of {source} conf: remove {MASTER}, or set "
                f"{key}: null in the topology's conf, too"
            )
