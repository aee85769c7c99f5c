"""Processes that fork after they have loaded libraries: a fork keeps only the thread that made
it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}


def fork_folder(socket: str | Path) -> Path:
    """Folder of the fork server's own socket, beside the ``socket`` of a code server."""
    return Path(os.path.abspath(socket) + ".forks")


def threads() -> int:
    """Number of threads of this process, including those of libraries; 2 where they cannot be
    counted.
    """
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 2


@contextmanager
def without_library_threads() -> Iterator[None]:
    """In this context, pandas and pyarrow start no threads when they are imported; the environment
    is then as before.
    """
    before = {name: os.environ.get(name) for name in _NO_THREADS}
    os.environ.update(_NO_THREADS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
