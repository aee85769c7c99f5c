"""Memory of a process that never ends, as the GNU C library manages it."""

import ctypes
from contextlib import suppress

_M_ARENA_MAX = -8


def return_free_memory() -> None:
    """Return the unused pages of the GNU C library's heap to the system, in about a millisecond;
    call it now and then.

    The library does so only at the end of a heap. Others have no such call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def keep_one_heap() -> None:
    """Give all threads of this process one heap, before they start; processes that it starts have
    theirs.

    By default each thread has its own, and what is free in each makes a process that never ends
    grow for hours.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
