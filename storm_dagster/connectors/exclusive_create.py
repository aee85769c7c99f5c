"""Creation of a file or object that does not exist, by one of several tasks."""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from storm_dagster.host.files import sync_path

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
"""Errors of a file system that has no links."""


def create_object(fs: Any, path: str, content: bytes) -> bool:
    """Create a file or object with its whole content, only if it does not exist.

    False if it exists. Of several tasks that do this at once, one creates it, on local file systems
    and on stores with conditional writes: S3, and those whose file system has ``mode="create"``.
    Elsewhere the check and the write are two steps.
    """
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if "file" in protocols:
        return _link_file(path, content)
    if fs.exists(path):
        return False
    if hasattr(fs, "call_s3"):
        return _put_object(fs, path, content)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    try:
        fs.pipe_file(path, content, mode="create")
    except FileExistsError:
        return False
    except (TypeError, NotImplementedError):
        # A file system of an earlier release of fsspec.
        fs.pipe_file(path, content)
    return _is_own(fs, path, content)


def _is_own(fs: Any, path: str, content: bytes) -> bool:
    """True if the object still has this content: a store may ignore the condition of a write."""
    return fs.cat_file(path) == content


def _link_file(path: str, content: bytes) -> bool:
    """Write a file beside the target, and give it that name if it is free."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    temporary = f"{folder}/.{secrets.token_hex(8)}"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create_exclusively(path, content)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    # The name, too, must survive a power cut.
    sync_path(Path(folder))
    return True


def _create_exclusively(path: str, content: bytes) -> bool:
    """Create a file on a file system without links.

    Another task may read a part of it, which it takes for damaged until it tries again.
    """
    try:
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _put_object(fs: Any, path: str, content: bytes) -> bool:
    """Put an object of S3 if the key is free; in two steps on servers without that condition."""
    bucket, _, key = path.partition("/")
    target = {"Bucket": bucket, "Key": key, "Body": content}
    try:
        fs.call_s3("put_object", **target, IfNoneMatch="*")
    except Exception as error:
        if fs.exists(path):
            # Another task's, or this one's whose response was lost: the caller reads it.
            return False
        if not any(
            word in str(error) for word in ("IfNoneMatch", "NotImplemented", "not implemented")
        ):
            raise
        fs.call_s3("put_object", **target)
    return _is_own(fs, path, content)
