"""One ZooKeeper server of the embedded kind as a child process of a test."""

from __future__ import annotations

import atexit
import errno
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from storm_dagster.model.errors import Unavailable
from storm_dagster.security.authority import CertificateFolder
from storm_dagster.testing.waiting import patience
from storm_dagster.zk.embedded import ServerFiles, server_answers, zookeeper_command
from storm_dagster.zk.session import ZkSession


def _bind(host: str, port: int) -> int:
    """The port, or a free one for 0, after having bound it for a moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Bound but not listening ports collide only in listen() when SO_REUSEADDR is set.
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Unavailable(
                    f"port {port} on {host} is taken by another process: stop that one, "
                    "or choose another port (storm.zookeeper.port, or dev --ports auto)"
                ) from None
            raise Unavailable(f"ZooKeeper cannot listen on {host}:{port}: {error}") from None
        return int(probe.getsockname()[1])


def client_context(certificates: CertificateFolder) -> ssl.SSLContext:
    """TLS context of a client with these certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificates.authority_file)
    context.load_cert_chain(certificates.client_file)
    return context


class EmbeddedZooKeeper:
    """One standalone ZooKeeper server as a child process of this one.

    It is stopped by :meth:`stop`, on leaving a ``with`` block, and at the latest when this process
    ends in order. Its state stays in ``data_dir`` and is found again by the next server that is
    given it.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        tick_ms: int = 500,
        log_path: Path | None = None,
        durable: bool = True,
        more: Mapping[str, object] | None = None,
        certificates: CertificateFolder | None = None,
    ) -> None:
        """``more``: further lines of its configuration; with ``certificates`` it speaks TLS."""
        self._more = more
        self._files = ServerFiles.of(certificates) if certificates is not None else None
        self._tls = client_context(certificates) if certificates is not None else None
        self.data_dir: Path = Path(data_dir)
        self.host = host
        self.log_path: Path = log_path or self.data_dir / "zookeeper.log"
        self._wanted_port = port
        self._port = port
        self._tick_ms = tick_ms
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """``host:port``, once started."""
        return f"[{self.host}]:{self._port}" if ":" in self.host else f"{self.host}:{self._port}"

    @property
    def port(self) -> int:
        """The client port; the one given, or the free one that was chosen for 0."""
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the server; ``Unavailable`` when it is not started."""
        if self._process is None:
            raise Unavailable("the embedded ZooKeeper is not started: call start() first")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout: float = 120.0) -> EmbeddedZooKeeper:
        """Start the server and wait until it serves; a second call on a running server does
        nothing.

        A port of 0 picks a free one, and another should that one be taken meanwhile. Raises
        ``Unavailable`` when the port is taken, Java is missing or too old, the server ends by
        itself (the message quotes its log), or it does not serve within ``timeout`` seconds.
        """
        if self.running:
            return self
        attempts = 5 if self._wanted_port == 0 and self._port == 0 else 1
        for attempt in range(attempts):
            port = _bind(self.host, self._port)
            try:
                self._launch(port, timeout)
            except Unavailable as error:
                if "taken" in error.message and attempt + 1 < attempts:
                    continue
                raise
            self._port = port
            return self
        raise AssertionError("unreachable")

    def _launch(self, port: int, timeout: float) -> None:
        command = zookeeper_command(
            self.data_dir,
            port,
            host=self.host,
            tick_ms=self._tick_ms,
            durable=self._durable,
            tls=self._files,
            more=self._more,
        )
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            start_of_log = log.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                close_fds=True,
            )
        self._process = process
        atexit.register(self.stop)
        deadline = time.monotonic() + patience(timeout)
        while True:
            code = process.poll()
            if code is not None:
                self._forget()
                output = self._log_since(start_of_log)
                if "Address already in use" in output:
                    raise Unavailable(
                        f"port {port} on {self.host} is taken by another process: stop that one, "
                        "or choose another port (storm.zookeeper.port, or dev --ports auto)"
                    )
                raise Unavailable(
                    f"ZooKeeper ended with code {code} while starting: see {self.log_path}: {output[-500:].strip()}"
                )
            if server_answers(self.host, port, tls=self._tls):
                return
            if time.monotonic() >= deadline:
                self.stop()
                raise Unavailable(
                    f"ZooKeeper does not serve on {self.host}:{port} after {patience(timeout):g} s: see {self.log_path}"
                )
            time.sleep(0.05)

    def _log_since(self, offset: int) -> str:
        with self.log_path.open("rb") as log:
            log.seek(offset)
            return log.read(1 << 20).decode("utf-8", "replace")

    def _forget(self) -> None:
        self._process = None
        atexit.unregister(self.stop)

    def stop(self, timeout: float = 60.0) -> None:
        """End the server: TERM, then KILL after ``timeout`` seconds. Stopping a stopped one does
        nothing.

        The first server of a machine writes its class data when it ends, which takes a busy machine
        many seconds.
        """
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(patience(timeout))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._forget()

    def kill(self) -> None:
        """End the server at once (KILL), as a crash would."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            self._forget()

    def __enter__(self) -> EmbeddedZooKeeper:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def ping(session: ZkSession) -> None:
    """One real round trip, so that the session's lease is fresh; ``Unavailable`` when it fails."""
    session.call(lambda client: client.exists_async(session.root or "/"), "a ping")
