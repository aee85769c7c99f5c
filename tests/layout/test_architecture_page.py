"""``docs/architecture.md`` names every package and folder, in the order of their imports."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "storm_dagster"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
IMPORT = re.compile(r"^\s*(?:from|import) storm_dagster\.(\w+)", flags=re.M)


def packages() -> set[str]:
    return {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def table(head: str) -> dict[str, str]:
    """First cell -> second cell of the rows below a head."""
    rows = PAGE.split(head)[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", rows, flags=re.M))


def test_the_page_names_every_package_in_the_order_of_imports() -> None:
    order = list(table("| package | subject |"))
    assert sorted(order) == sorted(packages())
    for package in order:
        imported: set[str] = set()
        for path in (PACKAGE / package).rglob("*.py"):
            imported |= set(IMPORT.findall(path.read_text(encoding="utf-8")))
        allowed = {*order[: order.index(package) + 1]}
        assert imported & packages() <= allowed, package


def test_the_page_names_every_folder_of_a_package() -> None:
    folders = table("| package | folders, each imported by those after it |")
    for path in PACKAGE.glob("*/*/__init__.py"):
        package, folder = path.parent.parent.name, path.parent.name
        assert f"`{folder}`" in folders.get(package, ""), f"{package}/{folder}"


def test_top_level_modules_are_named_too() -> None:
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert {name for name in modules if f"`{name}`" not in PAGE} == set()
