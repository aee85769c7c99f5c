"""A broker of Kafka that a test may end and start again."""

from __future__ import annotations

import base64
import os
import subprocess
import uuid
from pathlib import Path

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import KafkaException, NewTopic

from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_ports

PID = os.environ.get("KAFKA_PID", "")
"""Process of a broker on this machine, whose programs are used."""
_SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
"""


class OwnBroker:
    """A broker of its own, with the programs of the broker ``KAFKA_PID``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.port, controller = free_ports(2)
        self.bootstrap = f"127.0.0.1:{self.port}"
        self._folder = folder
        self._conf = folder / "server.properties"
        self._conf.write_text(
            _SETTINGS.format(port=self.port, controller=controller, data=folder / "data")
        )
        arguments = Path(f"/proc/{PID}/cmdline").read_bytes().decode().split("\0")
        self._java = [
            str(Path(f"/proc/{PID}/exe").resolve()),
            "-Xmx384m",
            "-cp",
            arguments[arguments.index("-cp") + 1],
        ]
        self._process: subprocess.Popen[bytes] | None = None
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        format_folder = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", self._conf]
        subprocess.run(
            [*self._java, *format_folder], check=True, capture_output=True, timeout=patience(60)
        )

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._java, "kafka.Kafka", self._conf],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        eventually(
            lambda: admin.list_topics(timeout=2).brokers,
            60,
            "the broker answers",
            interval=0.2,
            ignore=(KafkaException,),
        )

    def create_topics(self, *names: str) -> None:
        """Create topics of one partition."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        for response in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
            response.result(30)

    def stop(self) -> None:
        """End it as an operator does."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(patience(30))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(30)
            self._process = None
