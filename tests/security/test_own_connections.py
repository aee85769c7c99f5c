"""Connections of this process, as many threads ask for them at once."""

from __future__ import annotations

import os
import socket
import threading

from storm_dagster.security.own_connections import connections_to


def test_threads_that_ask_at_once_do_not_duplicate_each_others_duplicates() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        others = [socket.socket() for _ in range(50)]
        with socket.create_connection(("127.0.0.1", port)):
            before = len(os.listdir("/proc/self/fd"))
            largest = [before]
            numbers: list[int] = []

            def ask() -> None:
                for _ in range(20):
                    with connections_to(port) as links:
                        numbers.append(len(links))
                        largest.append(len(os.listdir("/proc/self/fd")))

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert set(numbers) == {1} and len(numbers) == 160
            # The duplicate of one connection, and what lists the folder.
            assert max(largest) <= before + 12
        for other in others:
            other.close()
