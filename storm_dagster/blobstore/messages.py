"""Blobs in HTTP messages between nimbuses and their clients."""

from collections.abc import Iterator
from typing import IO

import httpx

from storm_dagster.blobstore.store import no_such_blob
from storm_dagster.model.errors import StormDagsterError, Unavailable, error_from_document

_CHUNK_BYTES = 1 << 16
"""Bytes of one part of a request's body."""


def chunks_of(stream: IO[bytes]) -> Iterator[bytes]:
    """Chunks of a seekable stream, as the body of a request.

    They begin at the start of the stream. A retry can send the stream once more.
    """
    stream.seek(0)
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


def blob_response_error(response: httpx.Response, key: str | None = None) -> StormDagsterError:
    """Typed error of a nimbus's response to a request for the blob ``key``."""
    if response.request.method == "HEAD":  # A response without a body has only its status.
        if response.status_code == 404 and key is not None:
            return no_such_blob(key, str(response.url.copy_with(path="/", query=None)))
        return Unavailable(
            f"the nimbus at {response.url.host} answered {response.status_code}: retry"
        )
    try:
        return error_from_document(response.json())
    except ValueError:
        return Unavailable(
            f"{response.url} answered {response.status_code} with a body that is not valid JSON: "
            "is a nimbus listening there?"
        )
