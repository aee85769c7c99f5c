"""Stack of a component's call, for reports of calls that do not return."""

import os
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

_STANDARD_FOLDERS = {
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
}
_PRODUCT_FOLDER = Path(__file__).parents[2]
_LIBRARIES = (
    *(f"{folder}{os.sep}" for folder in (*_STANDARD_FOLDERS, _PRODUCT_FOLDER)),
    "<frozen",
)
"""Beginnings of file names that are not the user's code."""
_USER_FRAMES = 6
_LIBRARY_FRAMES = 2
"""Lines of a stack that are shown: of the user's code, and of the library that it calls."""


def component_stack(frame: FrameType | None, coroutine: Any = None) -> str:
    """Format the innermost lines of the user's code, outermost first.

    The innermost lines of the library that they call follow. ``frame`` is the innermost one of the
    thread. Of a coroutine that waits, its own frames are shown instead.
    """
    frames = _coroutine_frames(coroutine)
    if not frames and frame is not None:
        frames = list(traceback.walk_stack(frame))
        frames.reverse()
    stack = traceback.StackSummary.extract(iter(frames))
    end = _end_of_user_frames(stack)
    user_frames = stack[max(0, end - _USER_FRAMES) : end]
    library_frames = stack[end:][-_LIBRARY_FRAMES:]
    return "".join(traceback.format_list([*user_frames, *library_frames]))


def _end_of_user_frames(stack: traceback.StackSummary) -> int:
    """Index after the innermost frame of the user's code.

    The end, if there is no such frame.
    """
    for index in reversed(range(len(stack))):
        if not stack[index].filename.startswith(_LIBRARIES):
            return index + 1
    return len(stack)


def _coroutine_frames(coroutine: Any) -> list[tuple[FrameType, int]]:
    """(frame, line) of a coroutine that waits, and of those that it awaits.

    Empty without a coroutine, and for one that runs and blocks the event loop: the frames of the
    thread lead further in then.
    """
    frames: list[tuple[FrameType, int]] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is None:
            break
        frames.append((frame, frame.f_lineno))
        if coroutine.cr_running:
            return []
        coroutine = coroutine.cr_await
    return frames
