"""Disk space of an installation: a host of supervisors and workers, and the whole package.

Builds the wheel of this tree and installs it into fresh environments, from the package index (or
pip's cache of it). Sizes are what that adds to an environment that holds pip alone. ``--only worker
--into DIR`` leaves one environment there; ``--json`` prints for programs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "docker" / "requirements-worker.txt"


def build_wheel(folder: Path) -> Path:
    """The wheel of this tree."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return next(folder.glob("*.whl"))


def install(folder: Path, *steps: list[str]) -> float:
    """A fresh environment in ``folder``, with what each pip call installs; the megabytes that were
    added.
    """
    venv.create(folder, with_pip=True, symlinks=True)
    empty = size_mb(folder)
    for step in steps:
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, *step], check=True)
    return size_mb(folder) - empty


def size_mb(folder: Path) -> float:
    """Megabytes (10^6) of the blocks that the files in it use."""
    return (
        sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_symlink())
        / 1e6
    )


def main() -> None:
    """Install, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["worker", "whole"])
    parser.add_argument("--into", type=Path, help="Leave the environments below this folder.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wheel = str(build_wheel(Path(scratch)))
        kinds = {"worker": [["-r", str(WORKER)], ["--no-deps", wheel]], "whole": [[wheel]]}
        found = []
        for kind, steps in kinds.items():
            if options.only in (None, kind):
                folder = (options.into or Path(scratch)) / kind
                added = install(folder, *steps)
                names = {path.name for path in folder.glob("lib/python*/site-packages/*.dist-info")}
                parts = [name for name in names if not name.startswith(("pip-", "setuptools-"))]
                found.append({"kind": kind, "mb": added, "distributions": len(parts)})
    if options.json:
        print(json.dumps(found))
        return
    print("| installed | MB | distributions |\n|---|--:|--:|")
    for row in found:
        print(f"| {row['kind']} | {row['mb']:.0f} | {row['distributions']} |")


if __name__ == "__main__":
    main()
