"""Blob stores for archives, confs, topologies and results of submission steps.

A blob is bytes under a key. Its version is its content hash (SHA-256), never a time, so that
neither a restart nor a change of leader makes a blob look new.
"""

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.blobstore.store import BlobMeta, BlobStore

__all__ = ["BlobMeta", "BlobStore", "LocalBlobStore"]
