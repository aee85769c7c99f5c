"""Links to whole pages have the titles of these pages as their text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "RELEASING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+\.md)\)")
"""A link to a page without an anchor. A link into a page names a part of it and may be named after
that.
"""
LIST_LINK = re.compile(r"^[*-] \[([^\]]+)\]\(([^)#:]+\.md)\)", flags=re.M)


def title_of(page: Path) -> str:
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    assert found is not None, f"{page.name} has no title"
    return found[1]


def is_title(text: str) -> bool:
    """Text that begins with a capital letter names a page, unless it is the page's path."""
    return text[0].isupper() and not text.endswith(".md")


def wrong_links(page: Path) -> list[str]:
    """Links whose text is neither the title of the page nor its path nor a part of a sentence."""
    text = page.read_text(encoding="utf-8")
    named = {found for found in LINK.findall(text) if is_title(found[0])} | set(
        LIST_LINK.findall(text)
    )
    return [
        f"[{shown}]({target}) leads to {title_of(page.parent / target)!r}"
        for shown, target in sorted(named)
        if " ".join(shown.split()) != title_of(page.parent / target)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_has_the_title_of_its_page(page: Path) -> None:
    assert wrong_links(page) == []


def test_another_title_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A title\n")
    page = tmp_path / "here.md"
    page.write_text(
        "[A title](there.md), [the page](there.md), [Part](there.md#part), [THERE.md](there.md)\n"
    )
    assert wrong_links(page) == []
    page.write_text("See [Another\ntitle](there.md).\n\n* [the page](there.md)\n")
    assert len(wrong_links(page)) == 2
