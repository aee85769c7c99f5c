"""Settings of a client library in a component's conf, and the secrets among them."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from storm_dagster.model.conf import is_secret_key
from storm_dagster.model.errors import InvalidRequest, MissingPart


@contextmanager
def client_library(extra: str) -> Iterator[None]:
    """Import a client library in the block.

    Raises :class:`MissingPart` that names the ``extra`` that installs it.
    """
    try:
        yield
    except ImportError as error:
        reason = f"{error.name} is not installed on this host" if error.name else str(error)
        raise MissingPart(f"{reason}: pip install storm-dagster[{extra}]") from None


def file_system(url: str, settings: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of fsspec that a URL names, and the path there.

    It does not cache lists of files.
    """
    import fsspec

    options: dict[str, Any] = {}
    # SFTP passes unknown options to its client, which refuses them.
    if not url.startswith(("sftp:", "ssh:")):
        options["use_listings_cache"] = False
    options.update(settings)
    # The error of another file system names its package itself.
    with client_library("s3") if url.startswith("s3") else nullcontext():
        return fsspec.url_to_fs(url, **options)


def assets_of(system: str, *names: str) -> list[str]:
    """Keys of Dagster assets for the topics, tables or folders of a system.

    An example is ``kafka/orders``.
    """
    keys: list[str] = []
    for name in names:
        parts = [part for part in re.split(r"[^\w.-]+", name) if part]
        keys.append("/".join([system, *parts]))
    return keys


def client_settings(conf: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Settings of a client library: the keys of ``conf`` that begin with ``prefix``.

    The prefix is removed. A conf must not hold secrets, since pages and logs show it: ``KEY.file``
    names a file of the worker's host, whose content without surrounding white space is the value,
    and ``KEY.env`` a variable of the worker's environment. Raises :class:`InvalidRequest` if a
    secret is in the conf, is given twice, or cannot be read.
    """
    settings: dict[str, Any] = {}
    for name, value in sorted(conf.items()):
        if not name.startswith(prefix):
            continue
        key = name.removeprefix(prefix)
        if key.endswith(".file"):
            key = key.removesuffix(".file")
            value = _read_file(name, str(value))
        elif key.endswith(".env"):
            key = key.removesuffix(".env")
            value = _read_variable(name, str(value))
        elif is_secret_key(key):
            raise InvalidRequest(
                f"{name} would be shown with the conf: put the value into a file of the worker's "
                f"hosts and set {name}.file to its path, or set {name}.env to a variable of the "
                "worker's environment"
            )
        if key in settings:
            raise InvalidRequest(
                f"{prefix}{key} is given twice, the second time as {name}: leave one"
            )
        settings[key] = value
    return settings


def _read_variable(name: str, variable: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        raise InvalidRequest(f"{name}: the worker's environment has no variable {variable}: set it")
    return value


def _read_file(name: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{name}: {path} cannot be read on this host ({error}): put the value there"
        ) from None
