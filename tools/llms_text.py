"""Write ``docs/llms.txt``: every page of the documents with its first sentence.

The order and the sections are those of the site's navigation in ``docs/index.md``. A test fails
while the file is not current; run ``python tools/llms_text.py`` then.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
INTRODUCTION = """\
# storm_dagster

> Streaming topologies in Python that run on a cluster operated by Dagster: spouts and bolts, placed \
on slots, restarted after crashes, moved when a host is lost, upgraded worker by worker.
"""


def navigation(index: str) -> list[tuple[str, list[str]]]:
    """(caption, pages without suffix) of each part of the navigation, the start page left out."""
    parts: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", index, flags=re.S | re.M):
        caption = re.search(r"^:caption: (.+)$", block, flags=re.M)
        assert caption is not None, "each part of the navigation has a caption"
        pages = [line for line in block.splitlines() if re.fullmatch(r"[\w/-]+", line)]
        parts.append((caption[1], pages))
    return parts


def source_of(page: Path) -> str:
    """Text of a page, or of the file that it includes."""
    text = page.read_text(encoding="utf-8")
    included = re.match(r"```\{include\} (\S+)", text)
    if included is None:
        return text
    return (page.parent / included[1]).read_text(encoding="utf-8")


def title_and_summary(text: str) -> tuple[str, str]:
    """Title of a page, and the first sentence after it."""
    title = re.search(r"^# (.+)$", text, flags=re.M)
    assert title is not None, "a page has a title"
    paragraphs = text[title.end() :].strip().split("\n\n")
    prose = [part for part in paragraphs if re.match(r"[\w`*\[]", part)]
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(prose[0].split()))
    sentence = re.match(r".+?[.:](?= [A-Z`]|$)", plain)
    return title[1], (sentence[0] if sentence else plain).removesuffix(":")


def render(docs: Path, *, of_site: bool = False) -> str:
    """Text of ``llms.txt``.

    In the repository it links to the sources, and leaves out the reference, which exists on the
    site only. ``of_site``: links to the built pages, the reference included.
    """
    lines = [INTRODUCTION]
    index = (docs / "index.md").read_text(encoding="utf-8")
    start, summary = title_and_summary(index)
    lines += ["## Start", "", f"- [{start}]({'.' if of_site else 'index.md'}): {summary}", ""]
    for caption, pages in navigation(index):
        lines += [f"## {caption}", ""]
        for name in pages:
            if name.startswith("reference/") and not of_site:
                continue
            title, summary = title_and_summary(source_of(docs / f"{name}.md"))
            link = f"{name}/" if of_site else f"{name}.md"
            lines.append(f"- [{title}]({link}): {summary}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(render(DOCS), encoding="utf-8")
