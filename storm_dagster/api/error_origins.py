"""Origin of an error in code of users: another system, or a mistake in the code itself."""

import sys
import sysconfig
from concurrent import futures
from pathlib import Path, PurePath

from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.model.errors import StormDagsterError

_OUTAGES = (OSError, futures.TimeoutError, SystemUnavailable, StormDagsterError)
"""Errors of another system, in whichever library they are raised."""
_MISTAKES = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    NameError,
    ArithmeticError,
    AssertionError,
    ImportError,
    NotImplementedError,
    RecursionError,
)
"""Errors of code, also if a library has derived a class of its own from them."""
_CLIENT_MODULES = frozenset(
    (
        *("asyncio.exceptions", "ftplib", "http.client", "imaplib", "nntplib", "poplib"),
        *("smtplib", "sqlite3", "ssl", "xmlrpc.client"),
    )
)
"""Modules of the standard library that are clients of other systems."""
_LIBRARY_FOLDERS = frozenset(("site-packages", "dist-packages"))
_OWN_FOLDERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))
"""Folders of this package and of Python: an author looks for the place of an error elsewhere."""


def is_of_system(error: BaseException) -> bool:
    """True if the error is that of another system, or of the client library that calls it.

    Such an error is an outage of the system. False for any other error: the code that was called
    is at fault, and is not repaired by waiting. An error that was raised ``from`` another one has
    the origin of that one.
    """
    # By identity: the class of an error may call another one equal.
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if _is_of_system(cause):
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def _is_of_system(error: BaseException) -> bool:
    """:func:`is_of_system` of one error, without the errors that it was raised from."""
    if isinstance(error, _OUTAGES):
        return True
    if isinstance(error, _MISTAKES):
        return False
    return any(_is_of_client(kind) for kind in type(error).__mro__)


def _is_of_client(kind: type) -> bool:
    """True if a class is defined by a client library: an installed package, or one of Python's."""
    name = kind.__module__
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names or package == "storm_dagster":
        return name in _CLIENT_MODULES
    module = sys.modules.get(name)
    if module is None:
        # Extension modules give their classes names of modules that do not exist.
        return True
    path = getattr(module, "__file__", None)
    return path is not None and not _LIBRARY_FOLDERS.isdisjoint(PurePath(path).parts)


def one_line(error: BaseException) -> str:
    """Type, text and place of an error, in one line, without its traceback.

    The place is the last line of an author's code that it passed, if there is one.
    """
    text = " ".join(str(error).split())
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = ""
    step = error.__traceback__
    # Without the text of the lines, which another module would read from the files: an outage may
    # come with each call.
    while step is not None:
        file_name = step.tb_frame.f_code.co_filename
        if not _is_of_library(file_name):
            place = f" ({PurePath(file_name).name}, line {step.tb_lineno})"
        step = step.tb_next
    return described + place


def without_traceback(error: Exception) -> Exception:
    """The error itself, whose report is one line: an outage is not a mistake in code."""
    error.__traceback__ = None
    error.__cause__ = None
    error.__suppress_context__ = True
    return error


def _is_of_library(file_name: str) -> bool:
    """True if a file is one of an installed package, of this one, or of Python."""
    path = PurePath(file_name)
    # Modules that are compiled name their source as it was built.
    if not path.is_absolute() or not _LIBRARY_FOLDERS.isdisjoint(path.parts):
        return True
    return file_name.startswith(_OWN_FOLDERS)
