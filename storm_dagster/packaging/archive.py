"""The archive of a topology's code: a deterministic zip of a folder or package.

The same files give the same bytes, hence the same hash, so that an unchanged program is uploaded
once. The archive does not contain the cluster's HOME, hidden files, virtual environments, byte
code, and files that ``.gitignore`` names.
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
"""Maximum size of a program's own files; vendored requirements are not counted."""
MAX_FILES = 20_000
"""Maximum number of a program's own files."""
_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of all entries, the first of zip: the same files give the same bytes."""
_PIP_SECS = 600.0
"""Time that pip has to install the requirements."""
_UNIX = 3
"""System of the entries in a zip: their attributes are modes of Unix on every system."""


@dataclass(frozen=True)
class Archive:
    """A built archive."""

    path: Path
    sha256: str
    """Hash of its bytes, in hex."""
    size: int
    """In bytes."""
    files: int
    """Number of its entries; 0 for an archive of the user that is uploaded as it is."""


class IgnoreRules:
    """Ignore rules of one folder, from the ``.gitignore`` files of its repository.

    The rules of outer folders come first.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._specs: dict[Path, GitIgnoreSpec] = {}
        """Folder -> rules of its ``.gitignore``, of the folders that were visited."""
        self._outer = _outer_folders(self._root)

    def _spec(self, folder: Path) -> GitIgnoreSpec:
        """The rules of one folder's ``.gitignore``; none without a readable file."""
        if folder not in self._specs:
            try:
                text = (folder / ".gitignore").read_text(encoding="utf-8", errors="replace")
            except OSError:
                text = ""
            self._specs[folder] = GitIgnoreSpec.from_lines(_valid_lines(text))
        return self._specs[folder]

    def is_ignored(self, path: Path, is_folder: bool) -> bool:
        """True if the last rule that names ``path`` (below the root) ignores it.

        Callers check from the top down and do not descend into an ignored folder.
        """
        folders = [*self._outer, self._root]
        inner = self._root
        for name in path.relative_to(self._root).parts[:-1]:
            inner = inner / name
            folders.append(inner)
        is_ignored = False
        for folder in folders:
            name = path.relative_to(folder).as_posix()
            if is_folder:
                name += "/"
            verdict = self._spec(folder).check_file(name).include
            # ``None``: no rule of this folder names it. The rules of an inner folder come later
            # and win.
            if verdict is not None:
                is_ignored = verdict
        return is_ignored


def _outer_folders(root: Path) -> list[Path]:
    """The folders around ``root`` up to the root of its repository, outermost first.

    Their ``.gitignore`` files count, as in git. Empty outside of a repository.
    """
    if (root / ".git").exists():
        return []
    outer: list[Path] = []
    for folder in root.parents:
        outer.insert(0, folder)
        if (folder / ".git").exists():
            return outer
    return []


def _valid_lines(text: str) -> list[str]:
    """The lines that ``pathspec`` can compile.

    Git skips a broken pattern as well, and does not refuse the file.
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
    """Files below ``folder`` that are packed.

    Folders in ``skip``, which are resolved paths, are left out, and so are virtual environments
    and byte code; with ``rules`` also hidden and ignored entries. Links to folders are followed
    once, so that cycles end. Raises :class:`InvalidTopology` for a folder that cannot be read.
    """
    visited: set[Path] = set()
    pending = [folder]
    while pending:
        current = pending.pop()
        real = current.resolve()
        if real in visited or real in skip:
            continue
        visited.add(real)
        # A virtual environment, unless the user chose it as the root.
        if current != root and (current / "pyvenv.cfg").exists():
            continue
        try:
            entries = sorted(os.scandir(current), key=lambda entry: entry.name)
        except PermissionError as error:
            raise InvalidTopology(
                f"folder {current} cannot be read ({error.strerror}): name it in .gitignore"
            ) from None
        for entry in entries:
            name = entry.name
            path = Path(entry.path)
            if rules is not None and name.startswith("."):
                continue
            if name == "__pycache__" or name.endswith((".pyc", ".pyo")):
                continue
            is_folder = entry.is_dir()
            if not is_folder and not entry.is_file():
                continue  # sockets, pipes, devices and dangling links
            if rules is not None and rules.is_ignored(path, is_folder):
                continue
            if is_folder:
                pending.append(path)
            else:
                yield path


def collect_files(
    root: Path, include: Iterable[str] | None = None, *, leave_out: Iterable[Path] = ()
) -> dict[str, Path]:
    """Archive name -> file, of all files below ``root`` that are packed.

    ``include`` limits them to these names directly below ``root``; folders in ``leave_out`` are not
    packed. Raises :class:`InvalidTopology` for more than 64 MiB, with the names of the largest
    files, for more than 20,000 files, and for a folder that cannot be read.
    """
    root = root.absolute()
    skip = frozenset(path.resolve() for path in leave_out)
    rules = IgnoreRules(root)
    starts = [root] if include is None else [root / name for name in sorted(include)]
    files: dict[str, Path] = {}
    total = 0
    for start in starts:
        # A file that ``include`` names is packed even if a rule ignores it.
        for path in [start] if start.is_file() else _walk(start, root, rules, skip):
            files[path.relative_to(root).as_posix()] = path
            total += path.stat().st_size
            if len(files) > MAX_FILES:
                raise InvalidTopology(
                    f"folder {root} holds more than {MAX_FILES} files: move the topology into a "
                    "folder of its own, or name what does not belong to it in .gitignore"
                )
    if total > MAX_BYTES:
        raise InvalidTopology(
            f"the files of {root} take {total / 2**20:.1f} MiB, "
            f"an archive may hold {MAX_BYTES // 2**20} MiB; the largest are "
            f"{_describe_largest(files)}: name them in .gitignore, or move them elsewhere"
        )
    return files


def _describe_largest(files: dict[str, Path]) -> str:
    """Names and sizes of the five largest files."""
    sizes = [(path.stat().st_size, name) for name, path in files.items()]
    sizes.sort(key=lambda entry: -entry[0])
    return ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for size, name in sizes[:5])


def build_archive(out: Path, files: dict[str, Path], *, vendored: Path | None = None) -> Archive:
    """Write the zip of ``files`` (archive name -> file) to ``out``.

    It also contains the files below ``vendored``; a program's own file wins over a vendored one of
    the same name. Entries are sorted, dated 1980 and have only the executable bit. Raises
    :class:`InvalidTopology` without any entry.
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
            info.create_system = _UNIX
            is_executable = path.stat().st_mode & stat.S_IXUSR
            mode = 0o755 if is_executable else 0o644
            info.external_attr = (stat.S_IFREG | mode) << 16
            bundle.writestr(info, path.read_bytes())
    return Archive(out, hash_file(out), out.stat().st_size, len(entries))


@dataclass(frozen=True)
class Bundle:
    """Parts of an upload except the conf."""

    name: str
    """Name of the topology (:attr:`Description.name`)."""
    topology: TopologySpec
    archive: Archive


def vendor_requirements(file: Path, into: Path) -> None:
    """Install the requirements in ``file`` into the folder ``into``.

    Their dependencies are installed as well. The packages are those of this interpreter and
    platform: workers must run the same. Raises :class:`InvalidRequest` if the file is missing,
    :class:`InvalidTopology` with pip's last output if it fails, :class:`Unavailable` without pip,
    or if it takes longer than ten minutes.
    """
    if not file.is_file():
        raise InvalidRequest(f"--requirements {file}: the file does not exist")
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            f"--requirements needs pip, which {sys.executable} lacks: "
            f"run {sys.executable} -m ensurepip"
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
        finished = subprocess.run(
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
    if finished.returncode != 0:
        output = finished.stdout.decode("utf-8", "replace").strip()[-1500:]
        raise InvalidTopology(f"pip cannot install {file}: {output}")


def bundle_target(
    target: str,
    args: Sequence[str] = (),
    *,
    folder: Path,
    home: Path | None = None,
    requirements: Path | None = None,
) -> Bundle:
    """Describe ``target`` and build its archive inside ``folder``.

    ``folder`` is empty, and the caller removes it. The archive does not contain ``home``;
    ``requirements`` are vendored into it. A ``.zip``, ``.jar`` or ``.whl`` without requirements is
    uploaded byte for byte. Raises the errors of :func:`describe_target`, :func:`collect_files` and
    :func:`vendor_requirements`.
    """
    unpacked = folder / "unpacked"
    description = describe_target(target, args, unpacked=unpacked)
    vendored: Path | None = None
    if requirements is not None:
        vendored = folder / "vendored"
        vendor_requirements(requirements, vendored)
    path = description.target.path
    if description.target.kind != "archive" or path is None:
        leave_out = [home] if home is not None else []
        files = collect_files(description.root, description.include, leave_out=leave_out)
    elif vendored is None and not path.name.lower().endswith(".tar.gz"):
        # A zip already, and without an addition: not packed again.
        archive = Archive(path, hash_file(path), path.stat().st_size, 0)
        return Bundle(description.name, description.topology, archive)
    else:
        # Workers get a zip, which contains the vendored packages. The user chose the files of the
        # archive: all of them are packed.
        files = {
            entry.relative_to(unpacked).as_posix(): entry
            for entry in sorted(unpacked.rglob("*"))
            if entry.is_file() and not entry.is_symlink()
        }
    archive = build_archive(folder / "archive.zip", files, vendored=vendored)
    return Bundle(description.name, description.topology, archive)
