"""Texts of links to pages are the titles of these pages, and links to a heading find it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in (
            *("README.md", "SECURITY.md", "RELEASING.md", "CHANGELOG.md"),
            *("CONTRIBUTING.md", "AGENTS.md", "tests/README.md"),
        )
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+\.md)\)")
"""A link to a page without an anchor. A link into a page names a part of it and may be named after
that.
"""
LIST_LINK = re.compile(r"^[*-] \[([^\]]+)\]\(([^)#:]+\.md)\)", flags=re.M)


ANCHOR = re.compile(r"\]\(([^)\s:#]*\.md)?#([\w-]+)\)")
INCLUDE = re.compile(r"```\{include\} (\S+)")


def text_of(page: Path) -> str:
    """Text of a page, or of the file that it includes."""
    text = page.read_text(encoding="utf-8")
    included = INCLUDE.match(text)
    return text if included is None else text_of(page.parent / included[1])


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as the site and repository hosts make them, and named ones."""
    text = re.sub(r"^( *)```.*?^\1```", "", text_of(page), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, flags=re.M))


def title_of(page: Path) -> str:
    found = re.search(r"^# (.+)$", text_of(page), flags=re.M)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_to_a_heading_finds_it(page: Path) -> None:
    lost = [
        f"{target}#{anchor}"
        for target, anchor in ANCHOR.findall(page.read_text(encoding="utf-8"))
        if anchor not in anchors_of(page.parent / target if target else page)
    ]
    assert lost == []


def test_another_title_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A title\n")
    page = tmp_path / "here.md"
    page.write_text(
        "[A title](there.md), [the page](there.md), [Part](there.md#part), [THERE.md](there.md)\n"
    )
    assert wrong_links(page) == []
    page.write_text("See [Another\ntitle](there.md).\n\n* [the page](there.md)\n")
    assert len(wrong_links(page)) == 2
