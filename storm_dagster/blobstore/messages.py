"""Blobs in HTTP messages between nimbuses and their clients."""

from collections.abc import Iterator
from typing import IO

import httpx

from storm_dagster.blobstore.store import no_such_blob
from storm_dagster.model.errors import StormDagsterError, Unavailable, error_from_document

_CHUNK = 1 << 16


def chunks_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The content of a seekable stream from its beginning, as a body that may be sent again."""
    stream.seek(0)
    while chunk := stream.read(_CHUNK):
        yield chunk


def blob_response_error(response: httpx.Response, key: str | None = None) -> StormDagsterError:
    """The typed error of a nimbus's response, which asked for blob ``key``."""
    if response.request.method == "HEAD":  # A response without a body has only its status.
        if response.status_code == 404 and key is not None:
            return no_such_blob(key, str(response.url.copy_with(path="/", query=None)))
        return Unavailable(
            f"the nimbus at {response.url.host} answered {response.status_code}: try again"
        )
    try:
        return error_from_document(response.json())
    except ValueError:
        return Unavailable(
            f"{response.url} answered {response.status_code} with something that is not valid JSON: "
            "is a nimbus listening there?"
        )
