"""The end of queries whose topology is gone: a Connect server would run them until their session expires.

A worker stops its queries when it ends in order. One that was killed leaves them to its successor, which there is none of
when the topology was killed meanwhile. The client of Spark Connect takes 150 MB and seconds to load, so that it runs in a
process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

from storm_dagster.model.errors import Unavailable
from storm_dagster.model.spark_artifacts import query_session_id, remote_with_session
from storm_dagster.model.spark_token import with_spark_token
from storm_dagster.spark.session import check_reachable

_MOST_SECS = 60.0
_MOST_CLOSED = 1_000


def end_query_session(remote: str, code: str, token: str | None = None) -> None:
    """End the session that the queries of that code share, and with it what still runs in it.

    :class:`Unavailable` if the server does not answer. ``token`` is the one derived of the cluster's secret. A session
    that the URL names itself is its owner's, and goes on.
    """
    if ";session_id=" in remote:
        return
    check_reachable(remote)
    command = [sys.executable, "-m", __name__, code]
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_REMOTE"}
    url = with_spark_token(remote, derived=token)
    try:
        # The URL may hold a token, and every user can read a command line.
        done = subprocess.run(
            command, input=url, env=environment, capture_output=True, text=True, timeout=_MOST_SECS, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the Spark server did not end the queries of {code} within {_MOST_SECS:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it names no reason"])[-1]
        raise Unavailable(f"the Spark server did not end the queries of {code}: {last}")


def main() -> None:
    """``python -m`` with the code as its argument and the server's URL as its input."""
    from pyspark.sql import SparkSession

    url, code = sys.stdin.read().strip(), sys.argv[1]
    for number in range(_MOST_CLOSED):
        session = SparkSession.builder.remote(remote_with_session(url, query_session_id(code, number))).create()
        try:
            for query in session.streams.active:
                query.stop()
            session.client.release_session()
            return
        except Exception as error:
            if "SESSION_CLOSED" not in str(error):
                raise
        finally:
            session.client.close()


if __name__ == "__main__":
    main()
