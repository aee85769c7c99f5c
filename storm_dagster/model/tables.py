"""Tables of the package, which are YAML files beside the modules that read them."""

from importlib import resources
from typing import Any

import yaml


def load_table(module: str, name: str) -> Any:
    """The content of ``name.yaml`` beside that module."""
    text = resources.files(module.rpartition(".")[0]).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    # libyaml's parser, where PyYAML has it: every command and worker waits for this.
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
