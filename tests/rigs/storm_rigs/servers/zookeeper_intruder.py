"""A process of another user that poses as a ZooKeeper server on loopback."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from storm_dagster.security.peers import can_identify_peers
from storm_dagster.testing.waiting import patience

another_user = pytest.mark.skipif(
    os.getuid() != 0 or not can_identify_peers(), reason="only root becomes another user"
)

# It grants each client a session, so that one that trusts it goes on to show its password, and
# prints all that it was sent. It takes the port as soon as the former server has left it.
_PROGRAM = """
import os, socket, ssl, struct, sys, threading, time
user, port, pem = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
context = None
if pem:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
os.setgroups([])
os.setgid(user)
os.setuid(user)
received = []
session = struct.pack("!iiq", 0, 1_000, 1) + struct.pack("!i", 16) + bytes(16) + b"\\0"
def talk(link):
    try:
        if context:
            link = context.wrap_socket(link, server_side=True)
        received.append(link.recv(65536))
        link.sendall(struct.pack("!i", len(session)) + session)
        while data := link.recv(65536):
            received.append(data)
    except OSError:
        pass
started = threading.Event()
def serve(server):
    started.wait()
    while True:
        link, _ = server.accept()
        calls.append(1)
        os.write(1, b"called\\n")
        threading.Thread(target=talk, args=(link,), daemon=True).start()
calls = []
while True:
    try:
        server = socket.create_server(("127.0.0.1", port))
        break
    except OSError:
        time.sleep(0.001)
threading.Thread(target=serve, args=(server,), daemon=True).start()
print(server.getsockname()[1], flush=True)
started.set()
sys.stdin.readline()
os.write(1, f"end {len(calls)} {b''.join(received).hex()}\\n".encode())
os._exit(0)
"""


class ZooKeeperIntruder:
    """A listener of ``nobody``; a context manager that ends it."""

    def __init__(self, port: int = 0, pem: Path | None = None) -> None:
        """It takes ``port`` as soon as it is free. With ``pem`` it speaks TLS."""
        user = str(pwd.getpwnam("nobody").pw_uid)
        self._child = subprocess.Popen(
            [sys.executable, "-Sc", _PROGRAM, user, str(port), str(pem or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.calls = 0
        """Connections that it took; known after :meth:`received`."""

    def port(self) -> int:
        """Its port, once it has it."""
        assert self._child.stdout is not None
        return int(self._child.stdout.readline())

    def await_calls(self, number: int) -> None:
        """Wait until it took so many more connections; :meth:`port` must have returned."""
        assert self._child.stdout is not None
        for _ in range(number):
            assert self._child.stdout.readline() == "called\n"

    def received(self) -> bytes:
        """All that it was sent; it ends."""
        text, _ = self._child.communicate("end\n", timeout=patience(20))
        (end,) = [line for line in text.splitlines() if line.startswith("end ")]
        _, calls, sent = end.split(" ")
        self.calls = int(calls)
        return bytes.fromhex(sent)

    def __enter__(self) -> ZooKeeperIntruder:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()
