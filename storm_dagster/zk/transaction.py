"""Transaction: several writes that land together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

from kazoo import exceptions
from kazoo.client import TransactionRequest

from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Conflict,
    Fenced,
    InvalidRequest,
    InvalidTopology,
    Misconfigured,
)
from storm_dagster.model.records import MAX_NODE_BYTES
from storm_dagster.zk.session import ZkSession

MAX_TRANSACTION_BYTES = 768 * 1024
"""All data and paths of one transaction. ZooKeeper drops the connection at 1 MiB."""

_OVERHEAD_BYTES = 64
"""Upper bound of the framing of one operation."""


@dataclass(frozen=True)
class _Operation:
    kind: Literal["check", "create", "set", "delete"]
    path: str
    add: Callable[[TransactionRequest, str], None]
    """Adds the operation to a request; called with the request and the path on the server."""
    data: bytes = b""
    version: int = -1
    """Required data version; -1: any."""


def conflict(message: str, path: str) -> Conflict:
    """A ``Conflict`` that names the conflicting node."""
    error = Conflict(message)
    error.path = path
    return error


_REASONS: dict[type[Exception], str] = {
    exceptions.NodeExistsError: "it exists already",
    exceptions.NotEmptyError: "it has children",
    exceptions.NoChildrenForEphemeralsError: "its parent is ephemeral",
}
"""Words for the errors that need no more than their type."""


def _reason(operation: _Operation, error: exceptions.KazooException) -> str:
    """Reason in words why an operation failed."""
    if isinstance(error, exceptions.BadVersionError):
        return f"it has changed (version {operation.version} was expected)"
    if isinstance(error, exceptions.NoNodeError):
        return "its parent does not exist" if operation.kind == "create" else "it does not exist"
    return _REASONS.get(type(error), type(error).__name__)


class Transaction:
    """Operations collected by fluent calls and sent by :meth:`commit`, once.

    Versions are data versions as read, 0 included; ``-1`` means any version and is for deletions
    and for nodes that only this process writes. Paths are below the session's root.
    """

    def __init__(self, session: ZkSession) -> None:
        self._session = session
        self._operations: list[_Operation] = []
        self.size: int = 0
        """Bytes of the appended operations; a commit allows ``MAX_TRANSACTION_BYTES``."""
        self._committed = False
        """True from the call of :meth:`commit` on: a transaction is sent once."""
        self.afterwards: list[Callable[[], None]] = []
        """Called in order by the committer, once the transaction has landed."""

    def __len__(self) -> int:
        return len(self._operations)

    def _add(self, operation: _Operation) -> Transaction:
        """Append an operation, and return this transaction.

        Raises ``InvalidRequest`` for a wrong version, ``InvalidTopology`` for too much data.
        """
        if not isinstance(operation.version, int) or operation.version < -1:
            raise InvalidRequest(
                f"version {operation.version!r} of {operation.path} is not a data version"
            )
        if len(operation.data) > MAX_NODE_BYTES:
            raise InvalidTopology(
                f"{operation.path} would take {len(operation.data)} bytes, a ZooKeeper node may "
                f"hold {MAX_NODE_BYTES}: use fewer components, workers or tasks"
            )
        self._operations.append(operation)
        full_path = self._session.full(operation.path)
        self.size += len(operation.data) + len(full_path) + _OVERHEAD_BYTES
        return self

    def check(self, path: str, version: int) -> Transaction:
        """Commit only if the node has that data version.

        A failing check of ``/epoch`` is ``Fenced``.
        """

        def add(request: TransactionRequest, full: str) -> None:
            request.check(full, version)

        return self._add(_Operation("check", path, add, version=version))

    def create(
        self, path: str, data: bytes = b"", ephemeral: bool = False, sequence: bool = False
    ) -> Transaction:
        """Create the node, which must not exist; its parent must exist.

        With ``sequence`` ZooKeeper appends a number that rises with every child of the parent, so
        that such nodes are in the order of their transactions.
        """
        acl = self._session.acl(path)

        def add(request: TransactionRequest, full: str) -> None:
            request.create(full, data, acl, ephemeral, sequence)

        return self._add(_Operation("create", path, add, data))

    def set(self, path: str, data: bytes, version: int) -> Transaction:
        """Replace the data of the node if it has that version."""

        def add(request: TransactionRequest, full: str) -> None:
            request.set_data(full, data, version)

        return self._add(_Operation("set", path, add, data, version))

    def put(self, path: str, data: bytes, version: int | None) -> Transaction:
        """Replace the data if the node has that version.

        With ``None``, create the node.
        """
        if version is None:
            return self.create(path, data)
        return self.set(path, data, version)

    def delete(self, path: str, version: int = -1) -> Transaction:
        """Delete the node, which must exist and have no children."""

        def add(request: TransactionRequest, full: str) -> None:
            request.delete(full, version)

        return self._add(_Operation("delete", path, add, version=version))

    def commit(self) -> list[int | str | None]:
        """Send the operations: all of them land, or none.

        Returns, for each operation in order, the path of a create, the new version of a set, and
        ``None`` for the others. Raises ``Fenced`` if a check of the epoch failed, ``Conflict``
        (with ``path``) if any other operation failed, ``InvalidTopology`` if the transaction is too
        large, and ``Unavailable`` if the response was lost: the transaction may then have landed,
        and the caller must reread.
        """
        if self._committed:
            raise InvalidRequest("this transaction was committed already: collect a new one")
        if self.size > MAX_TRANSACTION_BYTES:
            raise InvalidTopology(
                f"the transaction takes {self.size} bytes, {MAX_TRANSACTION_BYTES} are allowed: "
                "use fewer components, workers or tasks"
            )
        self._committed = True
        if not self._operations:
            return []
        responses = self._session.call(
            lambda client: self._request(client).commit_async(),
            f"a transaction on {self._operations[-1].path}",
        )
        # First the operation that failed: all others have one of these two errors because of it.
        for operation, response in zip(self._operations, responses, strict=False):
            if isinstance(response, exceptions.RolledBackError | exceptions.RuntimeInconsistency):
                continue
            if isinstance(response, Exception):
                self._raise_failure(operation, response)
        results: list[int | str | None] = []
        for operation, response in zip(self._operations, responses, strict=True):
            if isinstance(response, Exception):
                raise conflict(
                    f"{operation.path} could not be written: {type(response).__name__}",
                    operation.path,
                )
            if operation.kind == "set":
                results.append(response.version)
            elif operation.kind == "create":
                results.append(self._session.strip(response))
            else:
                results.append(None)
        return results

    def _request(self, client: object) -> TransactionRequest:
        request = TransactionRequest(client)
        for operation in self._operations:
            operation.add(request, self._session.full(operation.path))
        return request

    @staticmethod
    def _raise_failure(operation: _Operation, error: Exception) -> NoReturn:
        """Raise the typed error for the operation that failed, as :meth:`commit` describes."""
        if not isinstance(error, exceptions.KazooException):
            raise error
        if isinstance(error, exceptions.NoAuthError):
            raise Misconfigured(
                f"ZooKeeper refuses to {operation.kind} {operation.path}, for lack of permission: "
                "check the credentials and the ACL of the node (storm-dagster daemon zookeeper "
                "secure sets all of them)"
            )
        if operation.kind == "check" and operation.path == paths.EPOCH:
            raise Fenced(
                f"leadership epoch {operation.version} is over, nothing was written: "
                "stop acting, and ask the new leader"
            )
        raise conflict(
            f"cannot {operation.kind} {operation.path}: {_reason(operation, error)}: read again",
            operation.path,
        )
