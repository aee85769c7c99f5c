"""The typed errors of the whole system.

There are one root and five branches. Each class has the HTTP status of the services and the exit
code of the command line, so that the mapping is in one place. A message names the thing, the
reason and the remedy, in this form::

    topology 'wc' needs 4 slots, 3 are free (s1: 1, s2: 2): add a supervisor or set
    topology.workers=3
"""

from typing import Any, ClassVar


class StormDagsterError(Exception):
    """Base of every error that this package raises on purpose.

    ``http_status`` is the status of the HTTP service's response; ``exit_code`` is the exit code of
    the command line.
    """

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    @property
    def message(self) -> str:
        """Thing, reason and remedy in one sentence."""
        return str(self.args[0]) if self.args else self.__class__.__name__

    @property
    def kind(self) -> str:
        """Name of the class.

        For a class of another module that of its nearest base here.
        """
        for cls in type(self).__mro__:
            if cls.__module__ == __name__:
                return cls.__name__
        return StormDagsterError.__name__

    def to_document(self) -> dict[str, Any]:
        """The error as JSON: ``{"error": {"type", "message"}}``."""
        return {"error": {"type": self.kind, "message": self.message}}


class InvalidRequest(StormDagsterError):
    """The caller's request is wrong, so that it is not retried."""

    http_status = 400
    exit_code = 2


class InvalidTopology(InvalidRequest):
    """A topology, its conf or its archive breaks a rule.

    No part of it was stored.
    """


class Misconfigured(InvalidRequest):
    """The cluster's conf is wrong, or a service that it names refuses it.

    An operator must correct it first.
    """


class NotAuthenticated(InvalidRequest):
    """The caller is not authenticated."""

    http_status = 401


class NotAuthorized(InvalidRequest):
    """The caller is authenticated, but not permitted to do this."""

    http_status = 403


class UnknownSubtree(InvalidRequest):
    """A watch fired below a first-level node without a kind of callbacks."""


class Conflict(StormDagsterError):
    """A race was lost, or the state does not allow the request.

    The caller must read the state a second time.
    """

    http_status = 409
    exit_code = 3

    path: str | None = None
    """The conflicting node of cluster state, when it was one."""


class NotAlive(Conflict):
    """The named topology does not run."""

    http_status = 404


class KeyNotFound(Conflict):
    """No blob, upload or run is known under the given key."""

    http_status = 404


class AlreadyAlive(Conflict):
    """A topology of that name exists already, in some status."""


class Unavailable(StormDagsterError):
    """Something that is needed is out of reach or used up now.

    A later try may succeed.
    """

    http_status = 503
    exit_code = 4


class NotLeading(Unavailable):
    """A nimbus that does not lead refused a write, before it did anything.

    Clients know it by its header (:data:`NOT_LEADING_HEADER`): in documents it is an
    ``Unavailable``, which clients of the release before retry.
    """

    @property
    def kind(self) -> str:
        """The name by which documents and clients know it."""
        return Unavailable.__name__


NOT_LEADING_HEADER = "X-Storm-Not-Leading"
"""Header of a response to a write that was refused because the nimbus does not lead; ``true``."""


class UntrustedServer(Unavailable):
    """A server is not known to be of the cluster, and was sent nothing.

    Another one, or this one later, may be: clients treat it like one that does not answer.
    """

    @property
    def kind(self) -> str:
        """The name by which documents and clients know it."""
        return Unavailable.__name__


NOTHING_SENT = "is sent nothing"
"""Words in the message of each :class:`UntrustedServer`."""


class MissingPart(Unavailable, ImportError):
    """A distribution that this host was installed without is needed here."""


class Fenced(StormDagsterError):
    """The writer's leadership epoch is over.

    The write did not land, and the writer must stop acting.
    """

    http_status = 409
    exit_code = 5


class Corrupt(StormDagsterError):
    """Error of stored bytes that are damaged.

    They are quarantined or reported, never guessed at.
    """

    http_status = 500
    exit_code = 6


ERRORS: tuple[type[StormDagsterError], ...] = (
    StormDagsterError,
    InvalidRequest,
    InvalidTopology,
    Misconfigured,
    NotAuthenticated,
    NotAuthorized,
    UnknownSubtree,
    Conflict,
    NotAlive,
    KeyNotFound,
    AlreadyAlive,
    Unavailable,
    NotLeading,
    UntrustedServer,
    MissingPart,
    Fenced,
    Corrupt,
)
"""Every type of error that a service may respond with."""

# Name of a class, as documents have it -> the class.
_BY_NAME: dict[str, type[StormDagsterError]] = {cls.__name__: cls for cls in ERRORS}


def error_from_document(document: Any) -> StormDagsterError:
    """The error that a service answered with, rebuilt from its JSON document.

    An unknown type becomes the root class, so that a newer server never makes an older client
    crash.
    """
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        return StormDagsterError(
            f"the service responded with something that is not an error document: {document!r:.200}"
        )
    return _BY_NAME.get(str(error.get("type")), StormDagsterError)(
        str(error.get("message", "no message"))
    )


def error_text(error: BaseException) -> str:
    """Text of an error for a sentence; the name of its class if it has no text.

    Errors of limits and of lost connections often have none, such as ``TimeoutError()``.
    """
    return str(error).strip() or type(error).__name__


def typed_error_text(error: BaseException) -> str:
    """Class of an error, and its text if it has one."""
    kind = type(error).__name__
    text = str(error).strip()
    return f"{kind}: {text}" if text else kind


def untrusted(error: Exception) -> UntrustedServer | None:
    """The error as a refusal of an untrusted server; ``None`` for another reason."""
    return error if isinstance(error, UntrustedServer) else None
