"""Baseline of the throughput benchmark: spout -> split -> count through Storm's multilang protocol.

The parent stands in for Storm's JVM shell components: it starts one pystorm process for each
component, speaks the protocol, keeps a window of tuples in flight to each bolt, and acks the spout
when its tuple left the split bolt and all its words left the count bolt. It keeps no acker tree,
which flatters the baseline.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

COMPONENTS = Path(__file__).with_name("multilang_components.py")
WINDOW = 1_000


class Shell:
    """One multilang subprocess."""

    def __init__(self, part: str, folder: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(COMPONENTS), part],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=1 << 16,
        )
        self._out: list[bytes] = []
        self.send(
            {
                "conf": {"topology.name": "baseline"},
                "pidDir": folder,
                "context": {"taskid": 1, "componentid": part, "task->component": {"1": part}},
            }
        )
        self.flush()
        while "pid" not in self.receive():
            pass

    def send(self, message: Any) -> None:
        """Queue one message."""
        self._out.append(msgspec.json.encode(message) + b"\nend\n")

    def flush(self) -> None:
        """Write what is queued."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(b"".join(self._out))
        self._out.clear()
        stdin.flush()

    def receive(self) -> Any:
        """The next message; ``EOFError`` when the process ended."""
        stdout = self.process.stdout
        assert stdout is not None
        lines: list[bytes] = []
        while True:
            line = stdout.readline()
            if not line:
                raise EOFError
            if line == b"end\n":
                return msgspec.json.decode(b"".join(lines))
            lines.append(line)

    def end(self) -> None:
        """Kill the process and wait for it."""
        self.process.kill()
        self.process.wait(timeout=10)


class MultilangChain:
    """The three processes and the queues between them, each pumped by threads of the parent."""

    def __init__(self, folder: str) -> None:
        self.spout = Shell("spout", folder)
        self.split = Shell("split", folder)
        self.count = Shell("count", folder)
        self.sentences: deque[tuple[str, list[Any]]] = deque()
        self.words: deque[list[Any]] = deque()
        self.acked: deque[str] = deque()
        self.in_split = threading.Semaphore(WINDOW)
        self.in_count = threading.Semaphore(WINDOW)
        self.done = 0
        self.stopping = False

    def run(self, seconds: float) -> float:
        """Sentences per second over ``seconds``, the first second left out."""
        threads = [
            threading.Thread(target=target, daemon=True)
            for target in (
                self._pump_spout,
                self._feed_split,
                self._read_split,
                self._feed_count,
                self._read_count,
            )
        ]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        began, first = time.monotonic(), self.done
        time.sleep(seconds)
        rate = (self.done - first) / 10 / (time.monotonic() - began)
        self.stopping = True
        for shell in (self.spout, self.split, self.count):
            shell.end()
        return rate

    def _pump_spout(self) -> None:
        try:
            while not self.stopping:
                if len(self.sentences) > WINDOW:
                    time.sleep(0.001)
                    continue
                requests = 0
                while self.acked and requests < 50:
                    self.spout.send({"command": "ack", "id": self.acked.popleft()})
                    requests += 1
                for _ in range(50):
                    self.spout.send({"command": "next"})
                requests += 50
                self.spout.flush()
                while requests:
                    message = self.spout.receive()
                    if message["command"] == "emit":
                        self.sentences.append((message["id"], message["tuple"]))
                    elif message["command"] == "sync":
                        requests -= 1
        except (EOFError, OSError):
            return

    def _feed(
        self, shell: Shell, queue: deque[Any], window: threading.Semaphore, component: str
    ) -> None:
        number = 0
        try:
            while not self.stopping:
                sent = 0
                while queue and sent < 100 and window.acquire(blocking=False):
                    item = queue.popleft()
                    number += 1
                    tup_id, values = item if isinstance(item, tuple) else (str(number), item)
                    shell.send(
                        {
                            "id": tup_id,
                            "comp": component,
                            "stream": "default",
                            "task": 1,
                            "tuple": values,
                        }
                    )
                    sent += 1
                if sent:
                    shell.flush()
                else:
                    time.sleep(0.0005)
        except OSError:
            return

    def _feed_split(self) -> None:
        self._feed(self.split, self.sentences, self.in_split, "spout")

    def _feed_count(self) -> None:
        self._feed(self.count, self.words, self.in_count, "split")

    def _read_split(self) -> None:
        try:
            while True:
                message = self.split.receive()
                if message["command"] == "emit":
                    self.words.append(message["tuple"])
                    while len(self.words) > 20 * WINDOW and not self.stopping:
                        time.sleep(0.001)
                elif message["command"] == "ack":
                    self.in_split.release()
                    self.acked.append(message["id"])
        except EOFError:
            return

    def _read_count(self) -> None:
        try:
            while True:
                if self.count.receive()["command"] == "ack":
                    self.done += 1
                    self.in_count.release()
        except EOFError:
            return


def sentences_per_second(seconds: float = 5.0) -> float:
    """Throughput of the chain."""
    with tempfile.TemporaryDirectory() as folder:
        return MultilangChain(folder).run(seconds)


if __name__ == "__main__":
    print(f"multilang chain: {sentences_per_second():,.0f} sentences/s")
