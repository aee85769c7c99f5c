"""Metadata of the distributions that depends on public addresses: project URLs, and a README whose
links are absolute.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s:#]+)(#[^)\s]*)?\)")


def absolute_links(text: str, *, files: str, pictures: str) -> str:
    """The text with each relative link under ``files`` and each picture under ``pictures``.

    Where an address is empty, links of its kind stay as they are.
    """

    def replace(found: re.Match[str]) -> str:
        mark, label, target, anchor = found[1], found[2], found[3], found[4] or ""
        base = pictures if mark else files
        return f"{mark}{label}({base}{target}{anchor})" if base else found[0]

    return _LINK.sub(replace, text)


class PublicAddresses(MetadataHookInterface):
    """Fills in ``urls`` and ``readme`` from ``release/addresses.toml``."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling while it builds or installs."""
        root = Path(self.root)
        addresses = tomllib.loads((root / "release" / "addresses.toml").read_text(encoding="utf-8"))
        metadata["urls"] = {name: url for name, url in addresses["urls"].items() if url}
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute_links(
                (root / "README.md").read_text(encoding="utf-8"), **addresses["readme"]
            ),
        }
