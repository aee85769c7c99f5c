"""Causes of Spark's errors: the innermost one, and outages.

Pure: texts and types of errors only, without pyspark and without a server.
"""

import re

from storm_dagster.spark.link import SESSION_GONE

_OUTAGE = re.compile(
    "|".join(SESSION_GONE) + "|INVALID_HANDLE|UNAVAILABLE|Connection refused|Connection reset|"
    "Socket closed|failed to connect to|RETRIES_EXCEEDED|No active Spark session|"
    "SparkContext was shut down|stopped SparkContext|Cannot call methods on a stopped"
)
"""Error messages of a server that is gone or restarts, and of a session that went with it."""
_TRACEBACK = "Traceback (most recent call last):"
_GROUP_PREFIX = re.compile(r"^\s*[|+] ?")
"""Begin of the lines of an exception group's traceback."""
_JVM_TRACE = re.compile(r"\n\s*JVM stacktrace:")
_BOILERPLATE = "An exception was thrown from the Python worker"
"""Begin of the text that Spark puts before the traceback of a Python function."""
_MAX_CAUSE = 500
"""Characters of a cause."""


def chain_of(error: BaseException) -> list[BaseException]:
    """The error and its chain of causes and contexts, each error once."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    # By identity: the class of an error may call another one equal.
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        causes.append(cause)
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return causes


def reads_like_outage(error: BaseException) -> bool:
    """True if the error says that Spark was away: a server or session that is gone.

    False for an error of the user's function that ran on Spark: that Spark answered. An error of a
    function's own client (``Connection refused`` of a database) may read like an outage, too, so
    Spark must be asked before it counts as one.
    """
    return any(_one_reads_like_outage(cause) for cause in chain_of(error))


def _one_reads_like_outage(error: BaseException) -> bool:
    name = type(error).__name__
    text = str(error)
    if name == "PythonException" or _TRACEBACK in text:
        # A Python process of Spark's ran the function: the error is what it raised.
        return False
    return _OUTAGE.search(f"{name}: {text}") is not None


def innermost(error: BaseException) -> str:
    """The type of an error, and the line of its text that names its cause.

    Of a Python traceback it is the exception that was raised last, and the first line of its
    message, else the first line that says something; at most 500 characters.
    """
    name = type(error).__name__
    details = getattr(error, "details", None)
    if callable(details) and details():
        # An error of gRPC: the first line of its text is "<_InactiveRpcError of RPC that terminated
        # with:".
        return f"{name}: {details():.{_MAX_CAUSE}}"
    text = _JVM_TRACE.split(str(error))[0]
    cause = _raised(text) or _first_line(text)
    return f"{name}: {cause:.{_MAX_CAUSE}}" if cause else name


def _raised(text: str) -> str:
    """The exception of the last traceback in a text; empty without one, or if it is cut."""
    lines = text.splitlines()
    headers = [number for number, line in enumerate(lines) if line.rstrip().endswith(_TRACEBACK)]
    if not headers:
        return ""
    header = lines[headers[-1]]
    below = lines[headers[-1] + 1 :]
    if _GROUP_PREFIX.match(header):
        below = [_GROUP_PREFIX.sub("", line, count=1) for line in below]
    elif header.lstrip().startswith("Traceback"):
        indent = len(header) - len(header.lstrip())
        below = [line[indent:] for line in below]
    # Frames, their source lines and marks are indented.
    while below and (not below[0].strip() or below[0][0].isspace()):
        del below[0]
    if not below:
        return ""
    raised = below[0].strip()
    if raised.endswith(":"):
        # The first line of its message is empty.
        message = next((line.strip() for line in below[1:] if line.strip()), "")
        raised = f"{raised} {message}" if message else raised[:-1]
    return raised


def _first_line(text: str) -> str:
    """The first line of a text that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(_BOILERPLATE)]
    return next(iter(telling or lines), "")
