"""Run the Dagster tests on the oldest Dagster that pyproject.toml allows and on the newest of the
index.

``python tests/compat/run.py [--only lowest|newest] [--keep FOLDER] [-- PYTEST ARGUMENTS]``: each
release gets an environment of its own, with this tree in it, below FOLDER (default ``.compat``; it
is used again the next time). ``tools/install.py`` installs the packages, as for ``make``. Needs
Java, as the tests do. Ends with 1 when a test of either fails, with 2 when an environment cannot be
made.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/dagster",
    "tests/code_server",
    "tests/nimbus/test_dagster_client.py",
    "tests/nimbus/test_dagster_access.py",
    "tests/nimbus/test_full_queue.py",
    "tests/security/test_dagster_web.py",
]
TOGETHER = ("dagster", "dagster-webserver", "dagster-dg-cli", "create-dagster")


def lowest_release() -> str:
    """The floor of ``dagster`` in pyproject.toml."""
    found = re.search(r'"dagster>=([0-9.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None, "pyproject.toml names no oldest dagster"
    return found[1]


def load_installer() -> ModuleType:
    """The installer of ``make``."""
    spec = importlib.util.spec_from_file_location("install_tool", ROOT / "tools" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_environment(installer: ModuleType, folder: Path, pins: list[str]) -> Path:
    """An environment with this tree, the group ``test`` and the pinned packages; its interpreter.

    The tests import the same packages as in ``make test``; a list of some of them would become
    incomplete with the next import.
    """
    for groups in ([], ["test"]):
        installer.install(folder, groups, pins=["--upgrade", *pins])
    return folder / "bin" / "python"


def main() -> int:
    """Run both; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("lowest", "newest"))
    parser.add_argument("--keep", type=Path, default=ROOT / ".compat", metavar="FOLDER")
    parser.add_argument("pytest", nargs="*", default=[], metavar="PYTEST ARGUMENTS")
    asked = parser.parse_args()
    pins = {
        "lowest": [f"{name}=={lowest_release()}" for name in TOGETHER],
        "newest": list(TOGETHER),
    }
    installer = load_installer()
    outcome: dict[str, int] = {}
    for which in ("lowest", "newest"):
        if asked.only not in (None, which):
            continue
        try:
            python = make_environment(installer, asked.keep / which, pins[which])
        except installer.CannotInstall as error:
            print(f"{which}: no environment could be made ({error})", file=sys.stderr)
            return 2
        version = subprocess.run(
            [str(python), "-c", "import dagster; print(dagster.__version__)"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
        print(f"== {which}: Dagster {version}", flush=True)
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(asked.pytest or TESTS),
        ]
        outcome[f"{which} (Dagster {version})"] = subprocess.run(
            command, cwd=ROOT, check=False
        ).returncode
    for name, status in outcome.items():
        print(f"{name}: {'passed' if status == 0 else f'failed, pytest ended with {status}'}")
    return 1 if any(outcome.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
