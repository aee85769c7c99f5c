"""The end of the queries of killed workers whose topology was removed.

Otherwise they run until their session expires.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.server_identity import PlaintextPeer, TrustedServers
from storm_dagster.security.spark_remote import (
    query_session_id,
    remote_with_session,
    with_spark_token,
)
from storm_dagster.spark.link import check_reachable, is_session_gone
from storm_dagster.spark.session import open_connect

_MAX_SECS = 60.0
"""Time that the separate process has to end the queries."""


def end_query_session(
    remote: str,
    code: str,
    servers: Sequence[str] = (),
    token: str | None = None,
    trusted: TrustedServers | None = None,
) -> None:
    """End the session that the queries of that code share, with the queries.

    :class:`Unavailable` if Spark fails to. ``servers`` are those of the cluster's conf, which get
    its token; ``token`` is derived from its secret. Other servers than ``trusted`` ones are sent
    nothing. A session that the URL names itself is not ended. Spark's client needs 150 MB, and
    therefore runs in a separate process.
    """
    if ";session_id=" in remote:
        return
    trusted = trusted or TrustedServers()
    check_reachable(remote, trusted=trusted)
    # By its input, because the URL may contain a token, and every user can read a command line.
    url = with_spark_token(remote, servers, derived=token)
    peers = [peer.text for peer in trusted.plaintext_peers]
    question = json.dumps([url, sorted(trusted.users), peers, trusted.needs_proof])
    command = [sys.executable, "-m", __name__, code]
    try:
        finished = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=_MAX_SECS, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"it takes more than {_MAX_SECS:g} s"
    else:
        if finished.returncode == 0:
            return
        lines = finished.stderr.strip().splitlines()
        reason = lines[-1] if lines else "it names no reason"
    raise Unavailable(
        mask_text(f"Spark did not end the queries of {code} ({reason}): restart it if they matter")
    )


def main() -> None:
    """End the session of the code in the first argument.

    The input is the server's URL, and the servers that may be sent to, as JSON.
    """
    url, users, peers, needs_proof = json.load(sys.stdin)
    trusted = TrustedServers(
        frozenset(users), tuple(PlaintextPeer.parse(text) for text in peers), needs_proof
    )
    code = sys.argv[1]
    # Ids of sessions that were closed before stay refused: the first number that is not is the one.
    number = 0
    while True:
        session = open_connect(remote_with_session(url, query_session_id(code, number)), trusted)
        try:
            for query in session.streams.active:
                query.stop()
            session.client.release_session()  # pyright: ignore[reportAttributeAccessIssue]
            return
        except Exception as error:
            if not is_session_gone(error):
                raise
            number += 1


if __name__ == "__main__":
    main()
