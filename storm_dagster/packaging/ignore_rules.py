"""What ``.gitignore`` files name, decided without git by ``pathspec``."""

from __future__ import annotations

from pathlib import Path

from pathspec import GitIgnoreSpec

__all__ = ["IgnoreRules"]


class IgnoreRules:
    """Ignore rules in force below one folder: those of its repository's ``.gitignore`` files, outer first."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._specs: dict[Path, GitIgnoreSpec] = {}
        # Outer .gitignore files count up to the repository's root, as in git.
        self._outer: list[Path] = []
        chain = [self._root, *self._root.parents]
        for depth, folder in enumerate(chain):
            if (folder / ".git").exists():
                self._outer = chain[1 : depth + 1][::-1]
                break

    def _spec(self, folder: Path) -> GitIgnoreSpec:
        if folder not in self._specs:
            try:
                text = (folder / ".gitignore").read_text(encoding="utf-8", errors="replace")
            except OSError:
                text = ""
            self._specs[folder] = GitIgnoreSpec.from_lines(_valid_lines(text))
        return self._specs[folder]

    def ignored(self, path: Path, is_folder: bool) -> bool:
        """Whether the last rule that names ``path`` (below the root) leaves it out.

        Asked top down: the caller does not descend into an ignored folder.
        """
        inside = path.relative_to(self._root)
        folders = [*self._outer, self._root, *(self._root / parent for parent in [*inside.parents][-2::-1])]
        ignored = False
        for folder in folders:
            name = path.relative_to(folder).as_posix() + ("/" if is_folder else "")
            named = self._spec(folder).check_file(name).include
            ignored = ignored if named is None else named
        return ignored


def _valid_lines(text: str) -> list[str]:
    """The lines that ``pathspec`` can compile: git skips a broken pattern, it does not refuse the file."""
    lines: list[str] = []
    for line in text.splitlines():
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue
        lines.append(line)
    return lines
