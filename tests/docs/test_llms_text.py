"""``docs/llms.txt`` lists every page of the site, and is current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def llms_text() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llms_text", ROOT / "tools" / "llms_text.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_current(llms_text: ModuleType) -> None:
    current = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert current == llms_text.render(DOCS), "run python tools/llms_text.py"


def test_every_page_is_listed_once() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize(
    ("text", "title", "summary"),
    [
        ("# A\n\nOne\nsentence. Another one.\n", "A", "One sentence."),
        ("# A\n\n| a | b |\n\nSee [the page](b.md) of `x.py`. More.\n", "A", "See the page of `x.py`."),
        ("# A\n\nThese are listed:\n\n* one\n", "A", "These are listed"),
    ],
)  # fmt: skip
def test_a_page_is_summed_up_by_its_first_sentence(
    llms_text: ModuleType, text: str, title: str, summary: str
) -> None:
    assert llms_text.title_and_summary(text) == (title, summary)
