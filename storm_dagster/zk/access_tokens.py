"""The list of access tokens in ZooKeeper, and its copy in a daemon."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from storm_dagster.core.access_tokens import TokenListing
from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt, StormDagsterError, Unavailable, error_text
from storm_dagster.model.records import decode_record
from storm_dagster.model.token_records import AccessTokenRecord, AccessTokens
from storm_dagster.zk.state_protocol import ClusterState, read_children

_log = logging.getLogger(__name__)
_POLL_SECS = 3.0
"""Pause between two reads. A revocation counts everywhere after it and the read itself."""
_FRESH_SECS = 8.0
"""Age above which the list is not fresh any longer: below the 10 s that the documents promise."""
_REFRESH_SECS = 1.0
"""Shortest time between two reads that requests with the same unknown token cause."""
_MAX_MISSED = 1_000
"""Unknown tokens whose last read is remembered."""


def read_token_records(state: ClusterState) -> dict[str, AccessTokenRecord]:
    """Id -> record of each token that counts.

    A record that cannot be read is logged and left out, so that its token does not count.
    """
    records: dict[str, AccessTokenRecord] = {}
    for token_id, (raw, _) in read_children(state, paths.ACCESS_TOKENS).items():
        path = paths.access_token(token_id)
        try:
            records[token_id] = decode_record(AccessTokenRecord, raw, path)
        except Corrupt as error:
            _log.error("the token does not count: %s", error.message)
    return records


def read_recorded_from(state: ClusterState) -> int | None:
    """Start of the first leader that records tokens; ``None`` before it."""
    raw = state.get_data(paths.ACCESS_TOKENS)
    if raw is None:
        return None
    return decode_record(AccessTokens, raw, paths.ACCESS_TOKENS).recorded_from_secs


class AccessTokenList:
    """Copy of the list in this process. Thread-safe.

    ``state`` returns the state of the cluster, ``None`` before a connection. :meth:`run` reads the
    list every three seconds: a request is answered from memory, and while ZooKeeper is away by the
    list that was read last.
    """

    def __init__(self, state: Callable[[], ClusterState | None]) -> None:
        self._state = state
        self._lock = threading.Lock()
        """Held by a read."""
        self._listing: TokenListing | None = None
        """The list as it was read last; its ``is_fresh`` is that of the read."""
        self._version = -1
        """Data version of the list's node at that read; -1 without the node."""
        self._read_at = float("-inf")
        """Monotonic time at which the last successful read began."""
        self._missed: dict[str, float] = {}
        """Id of an unknown token -> monotonic time of the read that it caused."""
        self._problem = ""
        """Problem that was logged last; empty without one."""

    def listing(self) -> TokenListing | None:
        """The list that was read last; ``None`` before the first read."""
        listing = self._listing
        if listing is None:
            return None
        is_fresh = time.monotonic() - self._read_at <= _FRESH_SECS
        return TokenListing(listing.records, listing.recorded_from_secs, is_fresh)

    def refresh(self, token_id: str) -> TokenListing | None:
        """Read the list again for a token that the list in memory lacks.

        One token causes a read a second at most. While ZooKeeper is away the list stays as it is.
        """
        now = time.monotonic()
        if now - self._missed.get(token_id, float("-inf")) >= _REFRESH_SECS:
            if len(self._missed) >= _MAX_MISSED:
                self._missed.clear()
            self._missed[token_id] = now
            self.read_now()
        return self.listing()

    def read_now(self) -> None:
        """Read the list; a problem is logged. Waits a second at most for another read."""
        # A read that hangs must not take the threads of all requests.
        if self._lock.acquire(timeout=_REFRESH_SECS):
            try:
                self._try_read()
            finally:
                self._lock.release()

    def run(self, ended: threading.Event) -> None:
        """Keep the list up to date until ``ended``."""
        while True:
            self.read_now()
            if ended.wait(_POLL_SECS):
                return

    def _try_read(self) -> None:
        """Read the list; a problem is logged when it begins."""
        problem = ""
        try:
            self._read()
        except StormDagsterError as error:
            problem = error.message
        except Exception as error:
            _log.exception("the list of access tokens cannot be read")
            problem = repr(error)
        if problem and not self._problem:
            _log.warning("the list of access tokens cannot be read now: %s", problem)
        self._problem = problem

    def _read(self) -> None:
        """Read the list if it has changed; :class:`Unavailable` without a connection."""
        began_at = time.monotonic()
        state = self._state()
        if state is None or not state.connected:
            raise Unavailable("ZooKeeper is out of reach")
        # A server that lags behind the others must not show a revoked token.
        state.sync_path(paths.ACCESS_TOKENS)
        version = state.get_version(paths.ACCESS_TOKENS)
        if version is None:
            self._set(TokenListing({}, None, is_fresh=True), -1, began_at)
            return
        if self._listing is None or version != self._version:
            # Each change raises the version. It was read first, so that a change that comes with
            # the records is read once more.
            records = read_token_records(state)
            listing = TokenListing(records, read_recorded_from(state), is_fresh=True)
            self._set(listing, version, began_at)
            return
        self._read_at = began_at

    def _set(self, listing: TokenListing, version: int, began_at: float) -> None:
        self._listing = listing
        self._version = version
        self._read_at = began_at


class OpenedTokenList:
    """Copy of the list in a process that has no connection to ZooKeeper yet.

    ``open_state`` opens one, and raises while there is no cluster. It is called in the thread of
    the list, so that the process starts without ZooKeeper.
    """

    def __init__(self, open_state: Callable[[], ClusterState]) -> None:
        self._open_state = open_state
        self._opened: ClusterState | None = None
        self._ended = threading.Event()
        self.tokens: AccessTokenList = AccessTokenList(self._connected_state)
        self._thread = threading.Thread(target=self._run, name="access-tokens", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and its connection."""
        self._ended.set()
        self._thread.join(5)

    def _connected_state(self) -> ClusterState | None:
        # Requests do not open it: they would wait for ZooKeeper.
        return self._opened

    def _run(self) -> None:
        """Open the connection, then keep the list up to date until the end."""
        problem = ""
        while self._opened is None:
            try:
                self._opened = self._open_state()
            except Exception as error:
                if error_text(error) != problem:
                    problem = error_text(error)
                    _log.warning("the list of access tokens cannot be read now: %s", problem)
                if self._ended.wait(_POLL_SECS):
                    return
        try:
            self.tokens.run(self._ended)
        finally:
            with suppress(StormDagsterError):
                self._opened.close()
