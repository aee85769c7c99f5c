"""Conf and packages that a command line gives a topology."""

from pathlib import Path
from typing import Any

from storm_dagster.cli.options import Invocation
from storm_dagster.model.conf import Conf, parse_assignments
from storm_dagster.model.conf_layers import LayerName, overlay
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.yaml_text import load_yaml


def _conf_file(path: Path) -> dict[str, Any]:
    """Read the map of a YAML or JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--conf-file {path} cannot be read: {error}") from None
    try:
        loaded = load_yaml(text)
    except ValueError as error:
        raise InvalidRequest(f"--conf-file {path} is not valid YAML: {error}") from None
    if not isinstance(loaded, dict | None):
        raise InvalidRequest(
            f"{path}: the conf must be a map of keys to values, got {type(loaded).__name__}"
        )
    return loaded or {}


def code_arguments(invocation: Invocation, options: dict[str, Any]) -> dict[str, Any]:
    """Move the options of new code out of ``options``.

    They are returned as arguments of the client's functions. The conf is ``-c topology.*``, then
    the file, then ``--conf``.
    """
    file = options.pop("conf_file")
    pairs = options.pop("pairs")
    requirements = options.pop("requirements")
    topology_conf = {
        key: value for key, value in invocation.overrides.items() if key.startswith("topology.")
    }
    layers: dict[LayerName, Conf] = {"option": topology_conf, "pair": parse_assignments(pairs)}
    if file is not None:
        layers["file"] = _conf_file(Path(file))
    return {
        "conf": overlay(layers),
        "home": invocation.home,
        "requirements": Path(requirements) if requirements else None,
    }
