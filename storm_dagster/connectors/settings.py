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

    :class:`MissingPart` names the command that installs it, and the ``extra`` that has it.
    """
    try:
        yield
    except ImportError as error:
        what = f"{error.name} is not installed on this host" if error.name else str(error)
        command = install_command(extra_requirements(extra))
        raise MissingPart(f"{what}: {command} (the extra {extra} of storm-dagster)") from None


def file_system(url: str, settings: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of fsspec that a URL names, and the path there. It remembers no lists of
    files.
    """
    import fsspec

    # The error of another file system names its package itself.
    with client_library("s3") if url.startswith("s3") else nullcontext():
        # SFTP hands what it does not know to its client, which refuses it.
        fresh = {} if url.startswith(("sftp:", "ssh:")) else {"use_listings_cache": False}
        return fsspec.url_to_fs(url, **{**fresh, **settings})


def assets_of(system: str, *names: str) -> list[str]:
    """Keys of the Dagster assets that topics, tables or folders of a system are, such as
    ``kafka/orders``.
    """
    return ["/".join([system, *filter(None, re.split(r"[^\w.-]+", name))]) for name in names]


def client_settings(conf: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The keys of ``conf`` that begin with ``prefix``, without it, for a client library.

    A secret never stands in a conf, which pages and logs show: ``KEY.file`` names a file of the
    worker's host, whose content without surrounding white space is the value, and ``KEY.env`` a
    variable of the worker's environment. :class:`InvalidRequest` if a secret is given as it is,
    twice, or cannot be read.
    """
    found: dict[str, Any] = {}
    for name, value in sorted(conf.items()):
        if not name.startswith(prefix):
            continue
        key, how = name.removeprefix(prefix), ""
        for suffix in (".file", ".env"):
            if key.endswith(suffix):
                key, how = key.removesuffix(suffix), suffix
        if is_secret_key(key) and not how:
            raise InvalidRequest(
                f"{name} would be shown with the conf: put the value into a file of the worker's hosts and set {name}.file "
                f"to its path, or set {name}.env to a variable of the worker's environment"
            )
        if key in found:
            raise InvalidRequest(
                f"{prefix}{key} is given twice, the second time as {name}: leave one"
            )
        found[key] = _read(name, str(value), how) if how else value
    return found


def _read(name: str, where: str, how: str) -> str:
    try:
        return Path(where).read_text("utf-8").strip() if how == ".file" else os.environ[where]
    except KeyError:
        raise InvalidRequest(
            f"{name}: the worker's environment has no variable {where}: set it"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{name}: {where} cannot be read on this host ({error}): put the value there"
        ) from None
