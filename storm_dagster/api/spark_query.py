"""A component that is a whole Structured Streaming query of the cluster's Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from storm_dagster.api.spark import SparkSpout
from storm_dagster.api.spark_session import spark_target
from storm_dagster.model.errors import InvalidTopology

__all__ = ["SparkQuery"]

_MODES = ("append", "complete", "update")


class SparkQuery(SparkSpout):
    """Component that owns a streaming query: its sources, joins, windows and watermarks, state and sink run on Spark.

    ``query`` names ``"module:function"``, called as ``function(spark, **args)``, which returns a streaming DataFrame.
    One of these takes its rows:

    * ``table``: a table of Spark's catalog,
    * ``path``: files of ``format`` (by default Parquet) in a folder or below a URL,
    * ``format`` alone: a sink such as ``"kafka"``, with ``options``,
    * ``each_batch``: ``"module:function"``, called beside the Spark server as ``function(frame, batch_id, **batch_args)``
      with each micro-batch. A batch that is repeated has the same id and the same rows,
    * none of them: the topology. Its columns of the names of ``outputs`` are emitted as a :class:`SparkSpout` does.

    One task owns the query. It starts the query, reports what Spark says of it, and stops it when the topology is
    deactivated or the task closes; a batch that runs then is repeated. ``output_mode`` is Spark's: ``append``,
    ``update`` or ``complete``. Rows of batches that have ended count as emitted and acked, the duration of a batch is a
    sample of the complete latency.

    Raises :class:`InvalidTopology`: when the topology is built, for arguments that cannot be right.
    """

    _function_args: ClassVar[tuple[str, ...]] = ("query", "each_batch")
    _shares_session: ClassVar[bool] = True

    def __init__(
        self,
        query: str,
        checkpoint: str,
        args: Mapping[str, Any] | None = None,
        table: str | None = None,
        path: str | None = None,
        format: str | None = None,
        options: Mapping[str, Any] | None = None,
        each_batch: str | None = None,
        batch_args: Mapping[str, Any] | None = None,
        output_mode: str = "append",
        columns: Sequence[str] = (),
        trigger: str = "1 second",
        chunk_rows: int = 5_000,
    ) -> None:
        super().__init__(query, checkpoint, args, columns, trigger, chunk_rows)
        sinks = {"table": table, "path": path, "each_batch": each_batch}
        given = [name for name, value in sinks.items() if value]
        if len(given) > 1:
            raise InvalidTopology(f"{query} has the sinks {' and '.join(given)}: name one, or one query for each")
        if output_mode not in _MODES:
            raise InvalidTopology(f"{query} has output_mode {output_mode!r}: give one of {', '.join(_MODES)}")
        self.table = table
        self.path = path
        self.format = format
        self.options: dict[str, Any] = dict(options or {})
        self.each_batch = each_batch
        self.batch_args: dict[str, Any] = dict(batch_args or {})
        self.output_mode = output_mode
        self._emits = not given and not format

    @classmethod
    def check_arguments(cls, owner: str, args: Mapping[str, Any], par: int, outputs: Any) -> None:
        """See ``Component.check_arguments``."""
        super().check_arguments(owner, args, par, outputs)
        try:
            query = cls(**args)
        except (TypeError, InvalidTopology) as error:
            raise InvalidTopology(f"{owner}: {error}") from None
        if query._emits and not outputs:
            raise InvalidTopology(
                f"{owner} has neither a sink nor outputs: give table, path, each_batch or format, or declare outputs"
            )
        if not query._emits and (outputs or par > 1):
            wrong, remedy = (
                ("outputs", "remove one of them") if outputs else (f"par={par}", "remove par, one task owns it")
            )
            raise InvalidTopology(f"{owner} has a sink and {wrong}: {remedy}")

    def deactivate(self) -> None:
        """Stop the query, unless its rows go to the topology: then Spark waits for the open batch."""
        if not self._emits:
            self._stop_query()

    def _writer(self, frame: Any) -> Any:
        if self._emits:
            writer = super()._writer(frame)
        elif self.each_batch:
            archive = self._archive
            # A classic session calls the function in this process, which has the archive.
            ships = archive is not None and archive.is_file() and spark_target(self._conf)[0] == "remote"
            content = archive.read_bytes() if ships and archive is not None else b""
            writer = frame.writeStream.foreachBatch(make_batch_function(self.each_batch, self.batch_args, content))
        else:
            writer = frame.writeStream.format(self.format or "parquet")
        if self.path:
            writer = writer.option("path", self.path)
        return writer.options(**self.options).outputMode(self.output_mode)

    def _run(self, writer: Any) -> Any:
        return writer.toTable(self.table) if self.table else writer.start()


def make_batch_function(reference: str, args: Mapping[str, Any], archive: bytes) -> Callable[[Any, int], None]:
    """Create the ``foreachBatch`` function that calls ``module:function`` of the topology's archive.

    Beside a Connect server Spark puts a session's archives on the path of Python workers, but not of the process that
    runs this function. So it brings the archive along. It is nested so that Spark ships it by value.
    """
    given = dict(args)
    loaded: list[Any] = []

    def each_batch(frame: Any, batch_id: int) -> None:
        import importlib
        import sys
        import tempfile

        if not loaded:
            if archive:
                folder = tempfile.TemporaryDirectory(prefix="storm-query-")
                with open(f"{folder.name}/topology.zip", "wb") as file:
                    file.write(archive)
                sys.path.insert(0, file.name)
                # Removed when the process ends.
                loaded.append(folder)
            module, _, name = reference.partition(":")
            target: Any = importlib.import_module(module)
            for part in name.split("."):
                target = getattr(target, part)
            loaded.append(target)
        loaded[-1](frame, batch_id, **given)

    return each_batch
