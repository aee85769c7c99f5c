"""A log page for browsers. What logs say is escaped and runs nothing."""

from __future__ import annotations

import re
from html import escape
from urllib.parse import quote

__all__ = ["log_page"]

_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def log_page(*, path: str, name: str, text: str, start: int, length: int, size: int) -> str:
    """HTML of the part of a log, with links to the other parts. Control and bidi characters are shown as ``\\ufffd``."""
    shown = escape(_UNSEEN.sub("\ufffd", text))
    last = max(0, size - length)
    places = {
        "first": 0,
        "previous": max(0, start - length),
        "next": min(start + length, last),
        "last": last,
    }
    links = " ".join(
        f'<a href="{escape(path)}?file={quote(name, safe="")}&amp;start={place}&amp;length={length}">{word}</a>'
        for word, place in places.items()
    )
    title = escape(_UNSEEN.sub("\ufffd", name))
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px sans-serif;margin:1em}pre{white-space:pre-wrap;overflow-wrap:anywhere}</style>"
        f"</head><body><h1>{title}</h1><p>bytes {start} to {start + len(text.encode('utf-8', 'replace'))} of {size}: {links}</p>"
        f"<pre>{shown}</pre><p>{links}</p></body></html>\n"
    )
