"""Vocabulary of the code: Storm's and Dagster's words in names, American spelling, one class for
each name.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("storm_dagster", "tests/rigs", "benchmarks", "examples")

REFUSED: dict[str, str] = {
    "deed deeds": "unreported event, outbox",
    "turnstile turnstiles": "assignments version, fenced transaction",
    "seat seats seated seating reseat": "slot",
    "allot allots allotted allotting allotment": "allocate",
    "wish wishes wished wishing": "user-defined assignment, requested workers",
    "homeless": "unplaced",
    "settle settles settled settling unsettled": "ack, stabilize, drain, match, wait_for",
    "twin twins": "local planner",
    "water_level water_levels": "fair share, quota",
    "owe owes owed owing": "pending",
    "forgive forgives forgave forgiven forgiving": "extend_deadline",
    "mend mends mended mending": "fix",
    "amiss": "problem",
    "guest guests": "background workload",
    "stranger strangers": "untrusted, unknown",
    "anew": "once more, from the beginning",
}
"""Forms of a word that no identifier may have as a part, and what to say instead."""
ANY_REFUSED = re.compile(
    "|".join(form.replace("_", "_?") for forms in REFUSED for form in forms.split()), re.IGNORECASE
)
"""What a text must match to have one of them: most files need not be taken apart."""
INSTEAD = {
    tuple(form.split("_")): instead for forms, instead in REFUSED.items() for form in forms.split()
}

REFUSED_PROSE: dict[str, str] = {
    "anew": "once more, from the beginning",
    "for ever": "permanently",
    "stranger": "an unknown user",
    "strangers": "unknown users",
    "anybody": "every user",
    "everybody": "every user, every client",
    "somebody": "another user, another process",
}
"""Words that no sentence of the code may have, and what to say instead."""
PROSE = re.compile(rf"\b(?:{'|'.join(REFUSED_PROSE)})\b", re.IGNORECASE)

STEMS = (
    *(
        "normal",
        "initial",
        "serial",
        "recogn",
        "organ",
        "optim",
        "minim",
        "maxim",
        "synchron",
        "author",
    ),
    *(
        "summar",
        "custom",
        "general",
        "special",
        "visual",
        "material",
        "final",
        "random",
        "parallel",
        "real",
    ),
    *(
        "token",
        "util",
        "categor",
        "emphas",
        "priorit",
        "standard",
        "local",
        "central",
        "memor",
        "apolog",
    ),
)
BRITISH = re.compile(
    rf"(?:{'|'.join(STEMS)})is(?:e|ed|es|er|ers|ing|able|ation|ations)(?![a-z])|(?:anal|paral)ys(?:e|ed|ing)(?![a-z])"
    r"|(?:behavi|col|neighb|fav|hon|lab|rum|harb)our|centre|defence|offence|licence|catalogue|programme(?!d|r)"
    r"|judgement|artefact|(?:label|model|signal|travel|level|marshal|tunnel)l(?:ed|ing)(?![a-z])"
    r"|fulfil(?!l)|grey|whilst|cheque(?!r)",
    re.IGNORECASE,
)
"""Whole words or their beginnings in British spelling."""


def parts_of(identifier: str) -> tuple[str, ...]:
    """The words of an identifier, split at underscores and at capitals."""
    return tuple(
        part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)
    )


def refused_in(identifier: str) -> list[str]:
    """What to say instead of each refused word of the identifier."""
    parts = parts_of(identifier)
    return [
        instead
        for words, instead in INSTEAD.items()
        if any(parts[start : start + len(words)] == words for start in range(len(parts)))
    ]


@cache
def files(*folders: str) -> dict[str, str]:
    """Path -> text of every Python file below the folders."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def tokens_of(text: str, *kinds: int) -> Iterator[tuple[int, str]]:
    """(line number, token) of the tokens of these kinds."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def refused_names(name: str, text: str) -> list[str]:
    """Identifiers of a file, and parts of its path, that have a refused word, each once."""
    if not ANY_REFUSED.search(name + text):
        return []
    named = [(0, part) for part in Path(name).with_suffix("").parts]
    found = {word: line for line, word in reversed([*named, *tokens_of(text, tokenize.NAME)])}
    return [
        f"{name}:{line}: {word}: say {'; '.join(refused_in(word))}"
        for word, line in sorted(found.items())
        if refused_in(word)
    ]


def documentation_of(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of docstrings: strings that stand as statements."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and type(node.value.value) is str
        ):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line


def refused_prose(name: str, text: str) -> list[str]:
    """Words in comments and docstrings of a file that :data:`REFUSED_PROSE` names."""
    words = [(line, word) for line, word in tokens_of(text, tokenize.COMMENT)]
    return [
        f"{name}:{line}: {match[0]}: say {REFUSED_PROSE[match[0].lower()]}"
        for line, sentence in (*words, *documentation_of(text))
        for match in PROSE.finditer(sentence)
    ]


def british_in(name: str, text: str) -> list[str]:
    """British spelling in identifiers, comments and docstrings of a file."""
    if not BRITISH.search(text):
        return []
    words = [(line, word) for line, word in tokens_of(text, tokenize.NAME, tokenize.COMMENT)]
    return [
        f"{name}:{line}: {match[0]}"
        for line, word in (*words, *documentation_of(text))
        for match in BRITISH.finditer(word)
    ]


def classes_of(text: str) -> Iterator[str]:
    """Public classes of a file, nested ones included, those in functions left out."""
    nodes: list[ast.AST] = [ast.parse(text)]
    while nodes:
        for node in ast.iter_child_nodes(nodes.pop()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name
            if isinstance(node, ast.ClassDef | ast.If | ast.Try):
                nodes.append(node)


def repeated_classes(texts: dict[str, str]) -> list[str]:
    """Names that several classes have, with the files of these."""
    where: dict[str, list[str]] = {}
    for name, text in texts.items():
        for found in classes_of(text):
            where.setdefault(found, []).append(name)
    return [
        f"{found}: {', '.join(names)}" for found, names in sorted(where.items()) if len(names) > 1
    ]


def test_identifiers_have_no_private_words() -> None:
    assert [
        line for name, text in files(*FOLDERS).items() for line in refused_names(name, text)
    ] == []


def test_comments_and_docstrings_have_no_refused_words() -> None:
    assert [
        line for name, text in files("storm_dagster").items() for line in refused_prose(name, text)
    ] == []


def test_spelling_is_american() -> None:
    assert [
        line for name, text in files("storm_dagster").items() for line in british_in(name, text)
    ] == []


def test_a_class_name_stands_for_one_class() -> None:
    assert repeated_classes(files("storm_dagster")) == []


@pytest.mark.parametrize(
    "identifier",
    [
        "seats",
        "_seat_even",
        "SeatTable",
        "usedSeats",
        "water_level",
        "WaterLevels",
        "unsettled",
        "mend",
        "MENDED",
    ],
)
def test_a_planted_word_is_found(identifier: str) -> None:
    assert refused_names("a.py", f"def f({identifier}: int) -> None: ...\n")
    assert refused_names(f"a/{identifier}.py", "")


@pytest.mark.parametrize(
    "identifier",
    ["amend", "recommended", "deedless", "resettlement", "water", "level", "renewal", "towed"],
)
def test_a_word_inside_another_is_left_alone(identifier: str) -> None:
    assert not refused_names(f"{identifier}.py", f"{identifier} = 1\n")


@pytest.mark.parametrize(
    "text",
    [
        "normalise = 1\n",
        "class Initialiser: ...\n",
        "x = 1  # Neighbouring hosts.\n",
        'x = 1\n"""Its colour."""\n',
    ],
)
def test_planted_british_spelling_is_found(text: str) -> None:
    assert british_in("a.py", text)


@pytest.mark.parametrize(
    "text", ["x = 1  # It begins anew.\n", 'def f() -> None:\n    """Wait\n\n    for ever."""\n']
)
def test_a_planted_word_in_prose_is_found(text: str) -> None:
    assert refused_prose("a.py", text)
    assert not refused_prose("a.py", 'x = "anew"  # A renewal.\n')


def test_american_spelling_and_strings_are_left_alone() -> None:
    text = '"""Normalized behavior; a promise; otherwise realistic."""\nraise CancelledError("in colour")\n'
    assert not british_in("a.py", text)


def test_a_repeated_class_is_found() -> None:
    texts = {
        "a.py": "class A:\n    class B: ...\n",
        "b.py": "class B: ...\nclass _C: ...\n",
        "c.py": "class _C: ...\n",
    }
    assert repeated_classes(texts) == ["B: a.py, b.py"]
