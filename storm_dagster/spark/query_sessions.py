"""The end of queries whose worker was killed and whose topology is gone: else they run until their
session expires.
"""

import subprocess
import sys
from collections.abc import Sequence

from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.spark_remote import (
    query_session_id,
    remote_with_session,
    with_spark_token,
)
from storm_dagster.spark.link import check_reachable, is_session_gone
from storm_dagster.spark.session import open_connect

_MOST_SECS = 60.0


def end_query_session(
    remote: str, code: str, servers: Sequence[str] = (), token: str | None = None
) -> None:
    """End the session that the queries of that code share, and what runs in it;
    :class:`Unavailable` if Spark does not.

    ``servers`` are those of the cluster's conf, which get its token; ``token`` is the one derived
    of its secret. A session that the URL names itself goes on. Spark's client takes 150 MB, so that
    it runs in a process of its own.
    """
    if ";session_id=" in remote:
        return
    check_reachable(remote)
    # The URL may hold a token, and every user can read a command line.
    url = with_spark_token(remote, servers, derived=token)
    command = [sys.executable, "-m", __name__, code]
    try:
        done = subprocess.run(
            command, input=url, capture_output=True, text=True, timeout=_MOST_SECS, check=False
        )
        reason = (
            (done.stderr.strip().splitlines() or ["it names no reason"])[-1]
            if done.returncode
            else ""
        )
    except subprocess.TimeoutExpired:
        reason = f"it takes more than {_MOST_SECS:g} s"
    if reason:
        raise Unavailable(
            mask_text(
                f"Spark did not end the queries of {code} ({reason}): restart it if they matter"
            )
        )


def main() -> None:
    """``python -m`` with the code as its argument and the server's URL as its input."""
    url, code, number = sys.stdin.read(), sys.argv[1], 0
    while True:
        session = open_connect(remote_with_session(url, query_session_id(code, number)))
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
