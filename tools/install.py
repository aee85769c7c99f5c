"""Install this repository and groups of its dependencies into a virtual environment: ``install.py
VENV GROUP...``.

Stands on the standard library alone and runs under the Python that the environment is made of.
``uv`` does the work (in parallel, with hard links into its cache): the one on PATH, else one
installed into the environment. It gets pip's configuration. Where uv cannot be had, cannot be
configured so, or fails, pip installs the same.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST, BEYOND = (3, 10), (3, 15)
# The first release that knows `pip install --group`, --system-certs and its variable.
UV = (0, 9)
# Options of pip -> variables of uv; an option that is in neither table leaves the work to pip.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "constraint": "UV_CONSTRAINT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
OF_NO_MATTER = {
    *("disable-pip-version-check", "retries", "quiet", "verbose", "no-color", "no-input", "progress-bar", "cache-dir"),
    *("no-cache-dir", "root-user-action", "log", "no-warn-script-location", "no-compile", "prefer-binary", "require-virtualenv"),
    *("break-system-packages", "user", "no-python-version-warning", "use-pep517", "yes", "format", "resume-retries", "config-file"),
}  # fmt: skip


class CannotInstall(Exception):
    """Installation is impossible; the message names the remedy."""


def pip_options(listing: str) -> dict[str, str]:
    """Option -> value of ``pip config list``; the environment wins over ``[install]``, that over
    ``[global]``.
    """
    found: dict[tuple[int, str], str] = {}
    for line in listing.splitlines():
        section, dot, rest = line.partition(".")
        option, equals, value = rest.partition("=")
        rank = {"global": 0, "install": 1, ":env:": 2}.get(section)
        if dot and equals and rank is not None:
            found[rank, option] = str(ast.literal_eval(value))
    return {option: found[rank, option] for rank, option in sorted(found)}


def uv_variables(options: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str] | None:
    """pip's options as variables of uv; ``None`` when an option has no counterpart. What is set for
    uv itself stays.
    """
    uv_settings: dict[str, str] = {}
    for option, value in options.items():
        if option in OF_NO_MATTER:
            continue
        if option not in UV_VARIABLES:
            return None
        words = value.split()
        if option == "find-links":
            value = ",".join(words)
        elif option == "no-index":
            if value.lower() not in ("1", "true", "yes", "on"):
                continue
            value = "1"
        else:
            value = " ".join(words)
        uv_settings[UV_VARIABLES[option]] = value
    if "UV_INDEX" in uv_settings:
        # pip takes the best version of all indexes; uv would stop at the first that has the name.
        uv_settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    # The certificates of the machine are pip's, too.
    uv_settings["UV_SYSTEM_CERTS"] = "true"
    if "UV_INDEX_URL" in given:
        uv_settings.pop("UV_DEFAULT_INDEX", None)
    return {name: value for name, value in uv_settings.items() if name not in given}


def run(*command: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether the command succeeded; its output goes to ours."""
    try:
        return (
            subprocess.run(
                command, env={**os.environ, **(env or {})}, cwd=ROOT, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


def output(*command: str) -> str | None:
    """Output of the command; ``None`` when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def recent_uv(path: str | None) -> str | None:
    """``path``, if that is a uv which is new enough."""
    said = output(path, "--version") if path else None
    match = re.match(r"uv (\d+)\.(\d+)", said or "")
    return path if match and (int(match[1]), int(match[2])) >= UV else None


class Environment:
    """A virtual environment and the ways into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = str(folder / "bin" / "python")

    def make(self) -> None:
        """Create it, with pip, unless it is there."""
        if output(self.python, "-m", "pip", "--version") is not None:
            return
        if run(sys.executable, "-m", "venv", str(self.folder)):
            return
        uv = recent_uv(shutil.which("uv"))
        made = uv and run(
            uv, "venv", "--quiet", "--clear", "--seed", "--python", sys.executable, str(self.folder)
        )
        if not made:
            raise CannotInstall(
                "cannot make a virtual environment: apt-get install python3-venv, then again"
            )

    def pip(self, *arguments: str) -> bool:
        """Run pip in it."""
        return run(self.python, "-m", "pip", *arguments)

    def uv(self) -> str | None:
        """A uv; installed into the environment where PATH has none that is new enough."""
        own = str(self.folder / "bin" / "uv")
        found = recent_uv(shutil.which("uv")) or recent_uv(own)
        if found:
            return found
        self.pip("install", "--quiet", "--upgrade", f"uv>={UV[0]}.{UV[1]}")
        return recent_uv(own)

    def cached_wheels(self) -> list[str]:
        """Folders with wheels of PySpark that pip has built.

        PySpark is published as source: 450 MB to unpack and pack again. pip keeps the wheel,
        whatever the index says about how long its files are good; uv builds again where the index
        does not say.
        """
        required = re.search(
            r'"(pyspark)(\[\w+\])?([^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        )
        if required:
            with tempfile.TemporaryDirectory() as copy:
                self.pip(
                    "wheel", "--quiet", "--no-deps", "--wheel-dir", copy, required[1] + required[3]
                )
        listed = (
            output(self.python, "-m", "pip", "cache", "list", "pyspark", "--format", "abspath")
            or ""
        )
        return sorted(
            {str(Path(line).parent) for line in listed.splitlines() if line.endswith(".whl")}
        )

    def install_with_uv(self, what: Sequence[str], base: bool) -> bool:
        """Whether uv could install ``what``; the ``base`` of the environment is compiled to
        bytecode.
        """
        variables = uv_variables(
            pip_options(output(self.python, "-m", "pip", "config", "list") or ""), os.environ
        )
        uv = self.uv() if variables is not None else None
        if uv is None or variables is None:
            return False
        links = [
            part
            for folder in (self.cached_wheels() if base else ())
            for part in ("--find-links", folder)
        ]
        return run(
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            self.python,
            *what,
            *links,
            *(["--compile-bytecode"] if base else []),
            env=variables,
        )

    def install_with_pip(self, what: Sequence[str]) -> bool:
        """Whether pip could install ``what``."""
        # The first that knows --group.
        return self.pip("install", "--quiet", "--upgrade", "pip>=25.1") and self.pip(
            "install", "--quiet", *what
        )


def install(
    folder: Path,
    groups: Sequence[str],
    environment_class: type[Environment] = Environment,
    pins: Sequence[str] = (),
) -> None:
    """Install the repository, editable, and the groups; :class:`CannotInstall`.

    ``pins`` are further arguments of ``pip install``: requirements that narrow those of the groups,
    and options such as ``--upgrade``.
    """
    if not OLDEST <= sys.version_info[:2] < BEYOND:
        raise CannotInstall(
            f"storm_dagster needs Python 3.10 to 3.14, {sys.executable} is {sys.version.split()[0]}: "
            "set PYTHON=/path/to/python3.x"
        )
    began = time.monotonic()
    print(
        f"installing storm_dagster {' '.join(('and', *groups)) if groups else ''} into {folder}",
        flush=True,
    )
    environment = environment_class(folder)
    environment.make()
    group_options = [part for group in groups for part in ("--group", group)]
    what = ["--editable", ".", *group_options, *pins]
    # A cluster is many processes that import the same at the same time: what all of them load is
    # compiled once, here. The groups are loaded by few, and are large: they are compiled when they
    # are imported.
    if not environment.install_with_uv(what, base=not groups):
        print("not with uv: pip takes over, which is slower", flush=True)
        if not environment.install_with_pip(what):
            raise CannotInstall("neither uv nor pip could install it: see their output above")
    if not groups:
        run(environment.python, "-m", "compileall", "-q", "storm_dagster")
    print(f"installed in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        install(Path(sys.argv[1]), sys.argv[2:])
    except CannotInstall as error:
        sys.exit(str(error))
