"""``submit --requirements FILE``: packages that the workers need, vendored into the archive by pip."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from storm_dagster.model.errors import InvalidRequest, InvalidTopology, Unavailable

__all__ = ["vendor_requirements"]


def vendor_requirements(file: Path, into: Path, *, timeout: float = 600.0) -> None:
    """Install what ``file`` lists, with its dependencies, into the folder ``into``.

    The packages are those of this interpreter and platform: workers must run the same. Raises
    :class:`InvalidRequest` when the file is missing, :class:`InvalidTopology` with pip's last words when it
    fails, :class:`Unavailable` when there is no pip or it takes longer than ``timeout`` seconds.
    """
    if not file.is_file():
        raise InvalidRequest(f"--requirements {file}: there is no such file")
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            f"--requirements needs pip, which {sys.executable} lacks: run {sys.executable} -m ensurepip"
        )
    command = [
        sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-compile",
        "--quiet", "--target", str(into), "--requirement", str(file.absolute()),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout,
            cwd=file.absolute().parent, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"pip did not finish {file} within {timeout:g} s: try again, or vendor by hand"
        ) from None
    if done.returncode != 0:
        words = done.stdout.decode("utf-8", "replace").strip()[-1500:]
        raise InvalidTopology(f"pip cannot install {file}: {words}")
