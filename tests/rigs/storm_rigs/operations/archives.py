"""Small archives for tests: real zips with the modules that a topology names."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable

_DATE = (2020, 1, 1, 0, 0, 0)


def pack_archive(text: str = "", modules: Iterable[str] = ("wc.spouts", "wc.bolts")) -> bytes:
    """A zip with those modules, each holding ``text`` as a comment: another text is another
    archive.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for module in modules:
            name = module.replace(".", "/") + ".py"
            archive.writestr(zipfile.ZipInfo(name, _DATE), f"# {text}\n")
    return buffer.getvalue()
