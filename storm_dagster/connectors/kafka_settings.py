"""Settings of librdkafka for the clients of a Kafka source."""

from collections.abc import Mapping
from typing import Any

from storm_dagster.model.errors import InvalidRequest

FIXED_SETTINGS = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}
"""Settings that the conf must not change."""


def default_settings(context: Any, label: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of librdkafka that the conf may override.

    ``label`` names the task, ``settings`` are those of the conf.
    """
    defaults: dict[str, Any] = {
        "group.id": f"{context.topology_name}.{context.component}",
        "client.id": label.replace(" ", "-"),
        "queued.max.messages.kbytes": 16_384,
        # A small record takes 400 bytes, which are not counted: so the queue is bounded by the size
        # of two responses.
        "queued.min.messages": 10_000,
        "fetch.message.max.bytes": 131_072,
        "fetch.queue.backoff.ms": 50,
        # A partition that was full may wait as long, until the fetch of the others is answered.
        "fetch.wait.max.ms": 100,
        # By default a broker that hangs would be an error only after a minute.
        "socket.timeout.ms": 10_000,
    }
    if "message.max.bytes" not in settings:
        # Librdkafka refuses a limit of fetches below the message.max.bytes of a sink.
        defaults["fetch.max.bytes"] = 1_000_000
    return defaults


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidRequest` for settings without brokers, or with one of the source."""
    if "bootstrap.servers" not in settings:
        raise InvalidRequest(
            "no Kafka broker is known: set kafka.bootstrap.servers in the conf of the topology"
        )
    fixed = sorted(FIXED_SETTINGS.keys() & settings.keys())
    if fixed:
        raise InvalidRequest(
            f"kafka.{fixed[0]} is set by the source itself: remove it from the conf"
        )
