"""Tables of the package: YAML files beside the modules that read them."""

import pkgutil
from typing import Any

import yaml


def load_table(module: str, name: str) -> Any:
    """The content of ``name.yaml`` beside that module."""
    text = pkgutil.get_data(module.rpartition(".")[0], f"{name}.yaml") or b""
    # libyaml's parser, where PyYAML has it: every command and worker waits for this.
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
