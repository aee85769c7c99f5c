"""Where a component's call stands, for reports of calls that do not return."""

import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[2]), "<frozen"}
)
_USER_FRAMES, _LIBRARY_FRAMES = 6, 2


def component_stack(frame: FrameType | None, coroutine: Any = None) -> str:
    """The innermost lines of the user's own code, and of the library that they are in; outermost
    first.

    ``frame`` is the innermost one of the thread; of a coroutine that waits, its own frames are
    shown instead.
    """
    frames: list[tuple[FrameType, int]] = []
    while coroutine is not None and (inner := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append((inner, inner.f_lineno))
        coroutine, running = coroutine.cr_await, coroutine.cr_running
        if running:
            # It blocks the event loop: the thread's frames lead further in.
            frames = []
            break
    if not frames and frame is not None:
        frames = [*traceback.walk_stack(frame)][::-1]
    stack = traceback.StackSummary.extract(iter(frames))
    own = [at for at, one in enumerate(stack) if not one.filename.startswith(_LIBRARIES)]
    end = own[-1] + 1 if own else len(stack)
    user, library = stack[max(0, end - _USER_FRAMES) : end], stack[end:][-_LIBRARY_FRAMES:]
    return "".join(traceback.format_list([*user, *library]))
