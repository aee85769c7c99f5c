"""Memory of a long-running process, as the GNU C library manages it."""

import ctypes
from contextlib import suppress

_M_ARENA_MAX = -8
"""Parameter of ``mallopt`` in ``malloc.h``: largest number of heaps."""


def return_free_memory() -> None:
    """Return the unused pages of the GNU C library's heap to the system.

    Call it regularly; it takes about a millisecond. The library itself returns only pages at the
    end of a heap. Other C libraries have no such call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def keep_one_heap() -> None:
    """Give all threads of this process one heap; call it before they start.

    By default each thread has its own heap, and the free memory in each makes a long-running
    process grow for hours. Child processes are not affected.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
