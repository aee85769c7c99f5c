"""The archive that travels with a topology, a deterministic zip of a folder or package, and what is
uploaded with it.

The same files give the same bytes, hence the same hash, so that an unchanged program is uploaded
once. Left out are the cluster's HOME, hidden files, virtual environments, byte code, and what
``.gitignore`` names.
"""

import importlib.util
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from storm_dagster.model.errors import InvalidRequest, InvalidTopology, Unavailable
from storm_dagster.model.topology import TopologySpec
from storm_dagster.packaging.target import describe_target
from storm_dagster.packaging.unpack import hash_file

MAX_BYTES = 64 * 1024 * 1024
"""Most bytes of a program's own files; vendored requirements are not counted."""
MAX_FILES = 20_000
_DATE = (1980, 1, 1, 0, 0, 0)
_PIP_SECS = 600.0


@dataclass(frozen=True)
class Archive:
    """A built archive."""

    path: Path
    sha256: str
    size: int
    files: int


class IgnoreRules:
    """Ignore rules in force below one folder: those of its repository's ``.gitignore`` files, outer
    first.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._specs: dict[Path, GitIgnoreSpec] = {}
        # Outer .gitignore files count up to the repository's root, as in git.
        chain = [self._root, *self._root.parents]
        depth = next((depth for depth, folder in enumerate(chain) if (folder / ".git").exists()), 0)
        self._outer = chain[1 : depth + 1][::-1]

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
        folders = [
            *self._outer,
            self._root,
            *(self._root / parent for parent in [*inside.parents][-2::-1]),
        ]
        ignored = False
        for folder in folders:
            name = path.relative_to(folder).as_posix() + ("/" if is_folder else "")
            named = self._spec(folder).check_file(name).include
            ignored = ignored if named is None else named
        return ignored


def _valid_lines(text: str) -> list[str]:
    """The lines that ``pathspec`` can compile: git skips a broken pattern, it does not refuse the
    file.
    """
    lines: list[str] = []
    for line in text.splitlines():
        with suppress(ValueError):
            GitIgnoreSpec.from_lines([line])
            lines.append(line)
    return lines


def _walk(
    folder: Path, root: Path, rules: IgnoreRules | None, skip: frozenset[Path]
) -> Iterator[Path]:
    """Files below ``folder`` that travel; links to folders are followed once, cycles are cut."""
    seen: set[Path] = set()
    pending = [folder]
    while pending:
        here = pending.pop()
        real = here.resolve()
        if real in seen or real in skip:
            continue
        seen.add(real)
        if here != root and (here / "pyvenv.cfg").exists():
            continue
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except PermissionError as error:
            raise InvalidTopology(
                f"folder {here} cannot be read ({error.strerror}): name it in .gitignore"
            ) from None
        for entry in entries:
            name, path = entry.name, Path(entry.path)
            if rules is not None and name.startswith("."):
                continue
            if name == "__pycache__" or name.endswith((".pyc", ".pyo")):
                continue
            is_folder = entry.is_dir()
            if not is_folder and not entry.is_file():
                continue  # sockets, pipes, devices and dangling links
            if rules is not None and rules.ignored(path, is_folder):
                continue
            if is_folder:
                pending.append(path)
            else:
                yield path


def collect_files(
    root: Path, include: Iterable[str] | None = None, *, leave_out: Iterable[Path] = ()
) -> dict[str, Path]:
    """Archive name -> file of everything below ``root`` that travels.

    ``include`` limits it to these names right below ``root``. Raises :class:`InvalidTopology`,
    naming the largest files, when they exceed 64 MiB, and when there are more than 20,000.
    """
    root = root.absolute()
    skip = frozenset(path.resolve() for path in leave_out)
    rules = IgnoreRules(root)
    starts = [root] if include is None else [root / name for name in sorted(include)]
    found: dict[str, Path] = {}
    total = 0
    for start in starts:
        # What was named is taken even if a rule would leave it out.
        for path in [start] if start.is_file() else _walk(start, root, rules, skip):
            found[path.relative_to(root).as_posix()] = path
            total += path.stat().st_size
            if len(found) > MAX_FILES:
                raise InvalidTopology(
                    f"folder {root} holds more than {MAX_FILES} files: move the topology into a folder of its own, "
                    "or name what does not belong to it in .gitignore"
                )
    if total > MAX_BYTES:
        largest = sorted(found.items(), key=lambda item: -item[1].stat().st_size)[:5]
        named = ", ".join(
            f"{name} ({path.stat().st_size / 2**20:.1f} MiB)" for name, path in largest
        )
        raise InvalidTopology(
            f"the files of {root} take {total / 2**20:.1f} MiB, an archive may hold {MAX_BYTES // 2**20} MiB; "
            f"the largest are {named}: name them in .gitignore, or move them elsewhere"
        )
    return found


def build_archive(out: Path, files: dict[str, Path], *, vendored: Path | None = None) -> Archive:
    """Write the zip of ``files`` (archive name -> file) and of everything below ``vendored`` to
    ``out``.

    A program's own file wins over a vendored one of the same name. Entries are sorted, dated 1980
    and carry only the executable bit.
    """
    entries = dict(files)
    if vendored is not None:
        for path in _walk(vendored, vendored, None, frozenset()):
            name = path.relative_to(vendored).as_posix()
            # Console scripts name the interpreter of the machine that packed them.
            if not name.startswith("bin/"):
                entries.setdefault(name, path)
    if not entries:
        raise InvalidTopology(
            "the archive would be empty: every file is hidden or named in .gitignore"
        )
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as bundle:
        for name in sorted(entries):
            path = entries[name]
            info = zipfile.ZipInfo(name, date_time=_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            executable = path.stat().st_mode & stat.S_IXUSR
            info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            bundle.writestr(info, path.read_bytes())
    return Archive(out, hash_file(out), out.stat().st_size, len(entries))


@dataclass(frozen=True)
class Bundle:
    """Parts of an upload except the conf."""

    name: str
    topology: TopologySpec
    archive: Archive


def vendor_requirements(file: Path, into: Path) -> None:
    """Install what ``file`` lists, with its dependencies, into the folder ``into``.

    The packages are those of this interpreter and platform: workers must run the same. Raises
    :class:`InvalidRequest` when the file is missing, :class:`InvalidTopology` with pip's last words
    when it fails, :class:`Unavailable` when there is no pip or it takes longer than ten minutes.
    """
    if not file.is_file():
        raise InvalidRequest(f"--requirements {file}: the file does not exist")
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            f"--requirements needs pip, which {sys.executable} lacks: run {sys.executable} -m ensurepip"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--no-compile",
        "--quiet",
        "--target",
        str(into),
        "--requirement",
        str(file.absolute()),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PIP_SECS,
            cwd=file.absolute().parent,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"pip did not finish {file} within {_PIP_SECS:g} s: try again, or vendor by hand"
        ) from None
    if done.returncode != 0:
        words = done.stdout.decode("utf-8", "replace").strip()[-1500:]
        raise InvalidTopology(f"pip cannot install {file}: {words}")


def bundle_target(
    target: str,
    args: Sequence[str] = (),
    *,
    folder: Path,
    home: Path | None = None,
    requirements: Path | None = None,
) -> Bundle:
    """Describe ``target`` and build its archive inside ``folder`` (empty, the caller's to remove).

    ``home`` is left out of the archive; ``requirements`` are vendored into it. A ``.zip``, ``.jar``
    or ``.whl`` without requirements is uploaded byte for byte. Errors as :func:`describe_target`,
    :func:`collect_files` and :func:`vendor_requirements`.
    """
    unpacked = folder / "unpacked"
    found = describe_target(target, args, unpacked=unpacked)
    vendored: Path | None = None
    if requirements is not None:
        vendored = folder / "vendored"
        vendor_requirements(requirements, vendored)
    path = found.target.path
    if found.target.kind != "archive" or path is None:
        files = collect_files(
            found.root, found.include, leave_out=[home] if home is not None else []
        )
    elif vendored is None and not path.name.lower().endswith(".tar.gz"):
        return Bundle(
            found.name, found.topology, Archive(path, hash_file(path), path.stat().st_size, 0)
        )
    else:
        # Workers get a zip; and what is to be vendored goes into it. The user chose these files:
        # all travel.
        files = {
            entry.relative_to(unpacked).as_posix(): entry
            for entry in sorted(unpacked.rglob("*"))
            if entry.is_file() and not entry.is_symlink()
        }
    return Bundle(
        found.name, found.topology, build_archive(folder / "archive.zip", files, vendored=vendored)
    )
