"""JSON in blobs: written compactly, read strictly."""

from __future__ import annotations

import json
from typing import Any

from storm_dagster.model.errors import Corrupt


def encode_json(document: Any) -> bytes:
    """The document as UTF-8 JSON without blanks. Maps keep their order: that of components decides task ids."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def decode_json(raw: bytes, what: str) -> Any:
    """The document in ``raw``; :class:`Corrupt`, naming ``what``, when it is not valid JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what} is not valid JSON ({error}): it was damaged, store it again") from None
