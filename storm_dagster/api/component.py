"""Base of spouts and bolts: spec, logging, metrics, errors; multilang programs."""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol

from storm_dagster.api.callbacks import check_component
from storm_dagster.api.specs import Inputs, Outputs, Spec
from storm_dagster.api.tuples import SYSTEM_TASK, is_tick
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import InvalidRequest, InvalidTopology

logger: logging.Logger = logging.getLogger("storm_dagster.component")
"""Logger of component code."""

# Name of a level, of streamparse too -> its number in Python's logging.
_LEVELS = {
    "trace": 5,
    "debug": 10,
    "info": 20,
    "warn": 30,
    "warning": 30,
    "error": 40,
    "critical": 50,
}


def log(message: str, level: str | int | None = None) -> None:
    """Write ``message`` to the worker's log.

    ``level`` is ``"debug"``, ``"info"`` (default), ``"warn"``, ``"error"``, or a number.
    """
    if isinstance(level, int):
        number = level
    else:
        number = _LEVELS.get((level or "info").lower(), logging.INFO)
    logger.log(number, "%s", message)


class _Late:
    """Attribute that is computed at each access.

    A component may assign its own value, as it may in streamparse.
    """

    def __init__(self, read: Any) -> None:
        self._read = read

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self._read(instance)


class Collector(Protocol):
    """Worker side of a running component. The worker and the test harness provide it."""

    def emit(
        self,
        tup: Sequence[Any],
        stream: str | None,
        anchors: Any,
        direct_task: int | None,
        need_task_ids: bool,
        tup_id: Any,
    ) -> list[int] | None: ...

    def ack(self, tup: Any) -> None: ...

    def ack_all(self, tups: Sequence[Any]) -> None: ...

    def fail(self, tup: Any, reason: Any = None) -> None: ...

    def give_up(self, *letter: Any) -> bool: ...

    def event(self, event: DagsterEvent, anchors: Any) -> None: ...

    def offer_event(self, event: DagsterEvent) -> Future[bool]: ...

    def joint(self, tups: Sequence[Any]) -> Any: ...

    def send_to_peer(self, task: int, values: Sequence[Any]) -> None: ...

    def error(self, error: BaseException, tup: Any = None) -> None: ...

    def metric(self, name: str, value: Any) -> None: ...

    def awaits(self, source: str, text: str) -> None: ...

    def count_batch(self, rows: int, nanos: int) -> None: ...


class Component:
    """Base of :class:`Spout` and :class:`Bolt`; not used directly."""

    outputs: ClassVar[Outputs] = None
    """Outputs: field names, a map from field names to types, or a list of :class:`Stream`.

    Fields without a :class:`Stream` are those of the default stream.
    """
    par: ClassVar[int] = 1
    """Number of executors; a spec's ``par`` overrides it."""
    config: ClassVar[Mapping[str, Any] | None] = None
    """Component conf; a spec's ``config`` overrides its keys."""
    blocking: ClassVar[bool] = False
    """True if its methods block (I/O, long computations).

    Then each task gets its own thread, and does not delay the other tasks of its worker.
    """

    _kind: ClassVar[str] = ""
    """``spout`` or ``bolt``; empty for a class that is neither."""
    _collector: Collector | None = None
    """Set by the worker or the harness before ``initialize``."""
    context: Any = None
    """The :class:`TopologyContext` of the task, from before ``initialize`` on."""
    conf: Mapping[str, Any] = {}
    """Topology conf, overridden by the component's conf, from before ``initialize`` on."""
    logger: logging.Logger = logger

    @classmethod
    def spec(
        cls,
        name: str | None = None,
        inputs: Inputs = None,
        par: int | None = None,
        config: Mapping[str, Any] | None = None,
        outputs: Outputs = None,
        args: Mapping[str, Any] | None = None,
    ) -> Spec:
        """The component as part of a topology.

        ``name`` defaults to the attribute that holds the spec. ``inputs`` are specs (shuffled), or
        a map from specs to groupings; ``spec["stream"]`` names a stream other than the default one.
        ``par`` is the number of executors, by default the class's own. ``args`` are JSON values,
        passed to the class when a task starts.
        """
        kind = cls._require_kind()
        arguments = dict(args or {})
        conf = cls._spec_conf(arguments)
        conf.update(cls.config or {})
        conf.update(config or {})
        return Spec(
            kind=kind,
            code=cls,
            args=arguments,
            name=name,
            inputs=inputs,
            par=cls.par if par is None else par,
            config=conf,
            outputs=cls.outputs if outputs is None else outputs,
        )

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf that the class requires, computed from the arguments of a spec.

        Subclasses may extend it.
        """
        return {}

    @classmethod
    def _spec_conf(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """The conf of a spec, without ``config`` of the class and of the spec."""
        return dict(cls.component_config(args))

    @classmethod
    def _require_kind(cls) -> str:
        """The kind of the class; :class:`InvalidRequest` if it is neither a spout nor a bolt.

        :class:`InvalidTopology` if a worker would not run one of its methods.
        """
        if not cls._kind:
            raise InvalidRequest(
                f"{cls.__name__} is neither a Spout nor a Bolt: derive it from one of them"
            )
        check_component(cls)
        return cls._kind

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Called once, before the first tuple.

        If it raises, the error is reported and the task retried later.
        """

    def close(self) -> None:
        """Called when the task closes gracefully, but not when its worker is killed."""

    def _bound(self) -> Collector:
        """The collector; :class:`InvalidRequest` while the component does not run."""
        if self._collector is None:
            raise InvalidRequest(
                f"{type(self).__name__} is not running: emit, ack and fail work from initialize() "
                "on, inside a worker or storm_dagster.testing.topology_harness"
            )
        return self._collector

    # -- names that streamparse users expect -------------------------------------------------------

    task_id: Any = _Late(lambda self: self.context.task_id)
    """Task id."""
    storm_conf: Any = _Late(lambda self: self.conf)
    """As ``conf``."""
    component_name: Any = _Late(lambda self: self.context.component)
    """Component id."""
    topology_name: Any = _Late(lambda self: self.context.topology_name)
    """Name of the topology."""
    debug: Any = _Late(lambda self: bool(self.conf.get("topology.debug")))
    """True if ``topology.debug`` is set."""
    pid: Any = _Late(lambda self: os.getpid())
    """Process id of the worker."""

    @staticmethod
    def is_tick(tup: Any) -> bool:
        """True if the tuple is a tick (``topology.tick.tuple.freq.secs``)."""
        return is_tick(tup)

    @staticmethod
    def is_heartbeat(tup: Any) -> bool:
        """True if the tuple is a heartbeat of the multilang protocol.

        Components in the worker get no heartbeats.
        """
        return tup.task == SYSTEM_TASK and tup.stream == "__heartbeat"

    def log(self, message: str, level: str | int | None = None) -> None:
        """Write to the worker's log."""
        log(message, level)

    def report_metric(self, name: str, value: Any) -> None:
        """Publish a number under ``name`` in the task's statistics.

        The newest value is shown. JSON has no NaN and no infinities: they are the texts ``"NaN"``,
        ``"Infinity"`` and ``"-Infinity"`` there, and numbers in Prometheus' format.
        """
        self._bound().metric(name, value)

    def _show_awaited(self, source: str, text: str) -> None:
        """Show the systems that the task waits for, by ``source``; see ``OutageReports``."""
        self._bound().awaits(source, text)

    def raise_exception(self, exception: BaseException, tup: Any = None) -> None:
        """Report an error, without an end of the task.

        The error is counted, and recorded among the topology's errors (throttled).
        """
        if not isinstance(exception, BaseException):
            raise InvalidRequest(
                f"raise_exception got {type(exception).__name__} {exception!r:.60}: "
                "pass an exception"
            )
        self._bound().error(exception, tup)


class _Shell(Component):
    """Base of the components that are multilang programs."""

    command: ClassVar[str | Sequence[str] | None] = None
    """The program, such as ``"python"`` or ``["ruby", "-W0"]``."""
    script: ClassVar[str | None] = None
    """Its script, relative to the archive's ``resources/`` folder."""

    @classmethod
    def spec(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        name: str | None = None,
        command: str | Sequence[str] | None = None,
        script: str | None = None,
        inputs: Inputs = None,
        par: int | None = None,
        config: Mapping[str, Any] | None = None,
        outputs: Outputs = None,
    ) -> Spec:
        """The program as part of a topology.

        ``command`` and ``script`` default to those of the class. The program is started without a
        shell, with the archive's ``resources/`` as its working folder. When it dies or hangs, it is
        replaced and its tuples are replayed. Raises :class:`InvalidTopology` without a program.
        """
        if command is None:
            command = cls.command
        if script is None:
            script = cls.script
        words = [command] if isinstance(command, str) else list(command or ())
        if script is not None:
            words.append(script)
        if not words or not all(isinstance(word, str) and word for word in words):
            raise InvalidTopology(
                f"{cls.__name__}.spec needs a command, such as command='python', script='count.py'"
            )
        spec = super().spec(name, inputs, par, config, outputs)
        spec._code = None
        spec._shell = tuple(words)
        return spec


class ShellBolt(_Shell):
    """A bolt that is a multilang program."""

    _kind = "bolt"


class ShellSpout(_Shell):
    """A spout that is a multilang program."""

    _kind = "spout"
