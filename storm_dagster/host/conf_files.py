"""Loader of the cluster conf from the files of a host."""

from dataclasses import replace
from pathlib import Path

import yaml

from storm_dagster.host.files import read_private_file
from storm_dagster.model.conf import (
    CONF_KEYS,
    SECRET_KEYS,
    ClusterConf,
    Conf,
    default_conf,
    yaml_problem,
)
from storm_dagster.model.errors import InvalidRequest


def load_cluster_conf(conf_dir: Path | None = None, overrides: Conf | None = None) -> ClusterConf:
    """Merge the defaults, the conf file of a folder, and ``overrides``.

    The file is ``conf_dir/storm.yaml``, if it exists. Later values win. Raises
    :class:`InvalidRequest` for unreadable YAML, unknown keys and values of a wrong type.
    ``nimbus.host`` becomes the only seed if ``nimbus.seeds`` is not given.
    """
    merged = ClusterConf(default_conf(), dict.fromkeys(CONF_KEYS, "default"))
    if conf_dir is not None:
        path = conf_dir / "storm.yaml"
        if path.is_file():
            try:
                loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise InvalidRequest(f"{path} is not valid YAML: {yaml_problem(error)}") from None
            if isinstance(loaded, dict) and any(loaded.get(key) for key in SECRET_KEYS):
                read_private_file(path, "the conf file with secrets")
            merged = merged.with_values(loaded if loaded is not None else {}, str(path))
    if overrides:
        merged = merged.with_values(overrides, "-c")
    if merged.get("nimbus.host") and merged.origins["nimbus.seeds"] == "default":
        host = merged["nimbus.host"]
        warning = f"nimbus.host is deprecated: write nimbus.seeds: [{host}]"
        merged = merged.with_values({"nimbus.seeds": [host]}, merged.origins["nimbus.host"])
        merged = replace(merged, warnings=(*merged.warnings, warning))
    return merged
