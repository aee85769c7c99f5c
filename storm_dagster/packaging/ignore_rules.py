"""What ``.gitignore`` files name, decided without git: the pattern rules of gitignore(5)."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["IgnoreRules", "Rule", "parse_rules"]


@functools.lru_cache(maxsize=1024)
def _pattern(glob: str) -> re.Pattern[str]:
    """The regular expression of a glob in which ``*`` stops at a slash and ``**/`` does not."""
    out: list[str] = []
    index = 0
    while index < len(glob):
        char = glob[index]
        if glob.startswith("**/", index) and (index == 0 or glob[index - 1] == "/"):
            out.append("(?:.*/)?")
            index += 3
            continue
        if glob[index:] == "**" and (index == 0 or glob[index - 1] == "/"):
            out.append(".+")
            break
        if char == "*":
            out.append("[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[":
            end = glob.find("]", index + 2)
            if end == -1:
                out.append(re.escape(char))
            else:
                body = glob[index + 1 : end].replace("\\", "\\\\")
                body = "^" + body[1:] if body[0] in "!^" else body
                out.append(f"(?!/)[{body}]")
                index = end
        elif char == "\\" and index + 1 < len(glob):
            index += 1
            out.append(re.escape(glob[index]))
        else:
            out.append(re.escape(char))
        index += 1
    return re.compile("".join(out), re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """One line of a ``.gitignore``."""

    glob: str
    anchored: bool
    """Matches only from the folder of its file; else at any depth below."""
    folders_only: bool
    negated: bool

    def matches(self, relative: str, is_folder: bool) -> bool:
        """Whether the path, relative to the rule's folder with ``/``, is named by this line."""
        if self.folders_only and not is_folder:
            return False
        subject = relative if self.anchored else relative.rpartition("/")[2]
        try:
            return _pattern(self.glob).fullmatch(subject) is not None
        except re.error:
            return False


def parse_rules(text: str) -> tuple[Rule, ...]:
    """The rules in a ``.gitignore`` text, in order."""
    rules: list[Rule] = []
    for raw in text.splitlines():
        line = raw.rstrip("\r")
        # Trailing blanks count only when escaped.
        while line.endswith(" ") and not line.endswith("\\ "):
            line = line[:-1]
        if not line or line.startswith("#"):
            continue
        negated = line.startswith("!")
        line = line[1:] if negated else line
        folders_only = line.endswith("/")
        line = line.rstrip("/") if folders_only else line
        anchored = "/" in line
        line = line.removeprefix("/")
        if line:
            rules.append(Rule(line, anchored, folders_only, negated))
    return tuple(rules)


class IgnoreRules:
    """The rules in force below one folder: those of its repository's ``.gitignore`` files, outer first."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._rules: dict[Path, tuple[Rule, ...]] = {}
        # Outer .gitignore files count up to the repository's root, as in git.
        self._outer: list[Path] = []
        chain = [self._root, *self._root.parents]
        for depth, folder in enumerate(chain):
            if (folder / ".git").exists():
                self._outer = chain[1 : depth + 1][::-1]
                break

    def _of(self, folder: Path) -> tuple[Rule, ...]:
        if folder not in self._rules:
            try:
                text = (folder / ".gitignore").read_text(encoding="utf-8", errors="replace")
            except OSError:
                text = ""
            self._rules[folder] = parse_rules(text)
        return self._rules[folder]

    def ignored(self, path: Path, is_folder: bool) -> bool:
        """Whether the last rule that names ``path`` (below the root) leaves it out.

        Asked top down: the caller does not descend into an ignored folder.
        """
        inside = path.relative_to(self._root)
        folders = [*self._outer, self._root, *(self._root / parent for parent in [*inside.parents][-2::-1])]
        verdict = False
        for folder in folders:
            relative = path.relative_to(folder).as_posix()
            for rule in self._of(folder):
                if rule.matches(relative, is_folder):
                    verdict = not rule.negated
        return verdict
