"""Processes that fork after they have loaded libraries.

A fork has only the thread that created it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
"""Variables by which the allocator of pyarrow and the OpenBLAS of numpy start no thread."""


def fork_folder(socket: str | Path) -> Path:
    """Folder of the fork server's socket.

    It is beside the ``socket`` of a code server.
    """
    return Path(os.path.abspath(socket) + ".forks")


def thread_count() -> int:
    """Number of threads of this process, including those of libraries.

    It is 2 on systems where they cannot be counted.
    """
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 2


@contextmanager
def without_library_threads() -> Iterator[None]:
    """Keep pandas and pyarrow from starting threads when they are imported.

    The environment is restored at the end of the context.
    """
    former = {name: os.environ.get(name) for name in _NO_THREADS}
    os.environ.update(_NO_THREADS)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
