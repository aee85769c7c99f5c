"""Parts of pictures as SVG text, without a drawing library.

Every string from users is escaped.
"""

import base64
import colorsys
from collections.abc import Mapping
from xml.sax.saxutils import escape, quoteattr

GONE = "#dc2626"
"""Outline of a supervisor that no longer lives."""
_MAX_LEGEND = 60
"""Number of entries of a legend; further ones are left out."""
FONT = "ui-sans-serif, system-ui, Helvetica, Arial, sans-serif"


def data_uri(svg: str) -> str:
    """The picture as ``data:image/svg+xml;base64,...``, a URL of a markdown image."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def document(width: int, height: int, title: str, body: list[str]) -> str:
    """A whole picture on white ground, with its title above."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" class="picture" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="{FONT}" '
        f'role="img" aria-label={quoteattr(clean(title))}>',
        f'<rect class="ground" width="{width}" height="{height}" fill="#ffffff"/>',
        label(12, 22, title, 14, "#111827", bold=True),
        *body,
        "</svg>",
    ]
    return "".join(parts)


def color(index: int) -> str:
    """A color for the index-th element; white text is readable on it."""
    # The golden angle keeps neighboring components apart; lightness 0.42 carries white text.
    red, green, blue = colorsys.hls_to_rgb((0.58 + index * 0.38196601) % 1.0, 0.42, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def short(text: str, max_length: int = 28) -> str:
    """Cut the text to at most this number of characters."""
    if len(text) <= max_length:
        return text
    return text[: max_length - 1] + "\u2026"


def clean(text: str) -> str:
    """Remove the control characters that XML cannot hold even when escaped."""
    return "".join(letter for letter in text if letter.isprintable())


def label(x: float, y: float, text: str, size: int, color: str, *, bold: bool = False) -> str:
    """Text with its baseline at (x, y), escaped."""
    weight = ' font-weight="600"' if bold else ""
    # The classes let a page choose other colors; white text on a color keeps its own.
    if color == "#ffffff":
        name = ""
    elif bold:
        name = ' class="strong"'
    else:
        name = ' class="dim"'
    return (
        f'<text{name} x="{x}" y="{y}" font-size="{size}" fill="{color}"{weight}>'
        f"{escape(clean(text))}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, fill: str, line: str, extra: str = ""
) -> str:
    """A rounded rectangle; ``extra`` are further attributes, such as a dash pattern."""
    name = "frame" if fill in ("#ffffff", "#f5f6f8") else "fill"
    if line == GONE:
        name += " gone"
    return (
        f'<rect class="{name}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
        f'fill="{fill}" stroke="{line}"{extra}/>'
    )


def bar(
    x: float, y: float, width: float, height: float, fill: str, words: str, opacity: float = 1.0
) -> str:
    """A part of a row, at least one pixel wide, with ``words`` as its tooltip."""
    return (
        f"<g><title>{escape(clean(words))}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{max(1.0, width):.1f}" '
        f'height="{height}" fill="{fill}" fill-opacity="{opacity}"/></g>'
    )


def legend(colors: Mapping[str, str], y: float, width: float, margin: int) -> tuple[list[str], int]:
    """Return at most 60 words with their colors, and the y below them.

    They are in rows from ``y`` on.
    """
    parts: list[str] = []
    x = float(margin)
    for words, fill in list(colors.items())[:_MAX_LEGEND]:
        # A square, and about 7 pixels for each letter.
        span = 26 + 7 * len(words)
        if x + span > width - margin and x > margin:
            x = float(margin)
            y += 22
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{fill}"/>')
        parts.append(label(x + 19, y + 11.5, words, 12, "#374151"))
        x += span
    return parts, int(y + 22 + margin)
