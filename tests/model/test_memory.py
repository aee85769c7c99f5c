"""Memory of daemons that never end: the heaps of the C library."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no such calls"
)

_HEAPS = """
import ctypes, sys, threading
from storm_dagster.host.memory import keep_one_heap
if sys.argv[1] == "one":
    keep_one_heap()
barrier = threading.Barrier(8)

def allocate():
    barrier.wait()
    kept = [bytearray(5000) for _ in range(10)]
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(library.fopen(sys.argv[2].encode(), b"w"))
library.malloc_info(0, stream)
library.fclose(stream)
"""

_PAGES = """
from pathlib import Path
from storm_dagster.host.memory import return_free_memory

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

# What stays keeps the end of the heap in use.
many = [bytearray(65_536) for _ in range(1_000)]
kept = many[::10]
full = pages()
del many
freed = pages()
return_free_memory()
print(full, freed, pages())
"""


def run(code: str, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("kind", "one"), [("one", True), ("default", False)])
def test_threads_of_a_daemon_have_one_heap(kind: str, one: bool, tmp_path: Path) -> None:
    run(_HEAPS, kind, str(tmp_path / "heaps.xml"))
    heaps = (tmp_path / "heaps.xml").read_text().count("<heap ")
    assert (heaps == 1) is one, heaps


def test_unused_pages_in_the_middle_of_a_heap_are_returned() -> None:
    full, freed, after = map(int, run(_PAGES).split())
    assert freed > full * 0.8, "the library keeps them"
    assert after < full * 0.5
