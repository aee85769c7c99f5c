"""Settings of a client library in a component's conf, and the secrets among them."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from storm_dagster.host.requirements import extra_requirements, install_command
from storm_dagster.model.conf import is_secret_key
from storm_dagster.model.errors import InvalidRequest, MissingPart


@contextmanager
def client_library(extra: str) -> Iterator[None]:
    """Import a client library in the block.

    Raises :class:`MissingPart`, which names the command that installs it and the ``extra`` that has
    it.
    """
    try:
        yield
    except ImportError as error:
        problem = f"{error.name} is not installed on this host" if error.name else str(error)
        command = install_command(extra_requirements(extra))
        raise MissingPart(f"{problem}: {command} (the extra {extra} of storm-dagster)") from None


def file_system(url: str, settings: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it.

    It does not cache lists of files.
    """
    import fsspec

    options = dict(settings)
    if not url.startswith(("sftp:", "ssh:")):
        # SFTP passes unknown options to its client, which refuses them.
        options.setdefault("use_listings_cache", False)
    # The error of another file system names its package itself.
    with client_library("s3") if url.startswith("s3") else nullcontext():
        return fsspec.url_to_fs(url, **options)


def assets_of(system: str, *names: str) -> list[str]:
    """Keys of the Dagster assets for topics, tables or folders of a system.

    For example ``kafka/orders``.
    """
    keys: list[str] = []
    for name in names:
        parts = [part for part in re.split(r"[^\w.-]+", name) if part]
        keys.append("/".join([system, *parts]))
    return keys


def client_settings(conf: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Settings of a client library, from the conf.

    They are the keys of ``conf`` that begin with ``prefix``, without it. A conf must not contain
    secrets, because pages and logs show it. ``KEY.file`` names a file of the worker's host, whose
    content without surrounding white space is the value, and ``KEY.env`` a variable of the worker's
    environment. Raises :class:`InvalidRequest` if the conf contains a secret, or has it twice, or
    if it cannot be read.
    """
    settings: dict[str, Any] = {}
    for name, value in sorted(conf.items()):
        if not name.startswith(prefix):
            continue
        key = name.removeprefix(prefix)
        reference = ""
        for suffix in (".file", ".env"):
            if key.endswith(suffix):
                key = key.removesuffix(suffix)
                reference = suffix
        if is_secret_key(key) and not reference:
            raise InvalidRequest(
                f"{name} would be shown with the conf: put the value into a file of the worker's "
                f"hosts and set {name}.file to its path, or set {name}.env to a variable of the "
                "worker's environment"
            )
        if key in settings:
            raise InvalidRequest(
                f"{prefix}{key} is given twice, the second time as {name}: leave one"
            )
        if reference == ".file":
            settings[key] = _read_file(name, str(value))
        elif reference == ".env":
            settings[key] = _read_variable(name, str(value))
        else:
            settings[key] = value
    return settings


def _read_file(name: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{name}: {path} cannot be read on this host ({error}): put the value there"
        ) from None


def _read_variable(name: str, variable: str) -> str:
    try:
        return os.environ[variable]
    except (KeyError, ValueError):
        raise InvalidRequest(
            f"{name}: the worker's environment has no variable {variable}: set it"
        ) from None
