"""A component that is a whole Structured Streaming query of the cluster's Spark."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from storm_dagster.api.spark.fused import make_loader
from storm_dagster.api.spark.spout import SparkSpout
from storm_dagster.model.errors import InvalidTopology

_MODES = ("append", "complete", "update")


class SparkQuery(SparkSpout):
    """Component that owns a streaming query, which runs on Spark as a whole.

    Its sources, joins, windows and watermarks, state and sink run there. ``query`` names
    ``"module:function"``, called as ``function(spark, **args)``, which returns a streaming
    DataFrame. Its rows go to a ``table`` of Spark's catalog; to files of ``format`` (by default
    Parquet) at ``path``; to a sink of ``format`` alone, such as ``"kafka"``; or to ``each_batch``,
    ``"module:function"``, called beside the Spark server as ``function(frame, batch_id,
    **batch_args)``: a batch that is repeated has the same id and the same rows. Without a sink,
    they are emitted to the topology as by a :class:`SparkSpout`.

    One task owns the query, and stops it when the topology is deactivated or the task closes; a
    batch that runs at that time is repeated. Rows of batches that have ended count as emitted and
    acked, the duration of a batch is a sample of the complete latency. Invalid arguments raise
    :class:`InvalidTopology` when the topology is built.
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
        sink_names = [name for name, value in sinks.items() if value]
        if len(sink_names) > 1:
            raise InvalidTopology(
                f"{query} has the sinks {' and '.join(sink_names)}: name one, or one query for each"
            )
        if output_mode not in _MODES:
            raise InvalidTopology(
                f"{query} has output_mode {output_mode!r}: give one of {', '.join(_MODES)}"
            )
        self.table = table
        self.path = path
        self.format = format
        self.options: Mapping[str, Any] = options or {}
        self.each_batch = each_batch
        self.batch_args: Mapping[str, Any] = batch_args or {}
        self.output_mode = output_mode
        # Without a sink its rows become tuples.
        self._emits = not sink_names and not format

    @classmethod
    def _check_arguments(cls, owner: str, args: Mapping[str, Any], par: int, outputs: Any) -> None:
        super()._check_arguments(owner, args, par, outputs)
        try:
            query = cls(**args)
        except (TypeError, InvalidTopology) as error:
            raise InvalidTopology(f"{owner}: {error}") from None
        if query._emits and not outputs:
            raise InvalidTopology(
                f"{owner} has neither a sink nor outputs: "
                "give table, path, each_batch or format, or outputs"
            )
        if not query._emits and outputs:
            raise InvalidTopology(f"{owner} has a sink and outputs: remove one of them")
        if not query._emits and par > 1:
            raise InvalidTopology(f"{owner} has a sink and par={par}: one task owns a query")

    def deactivate(self) -> None:
        """Stop the query, unless its rows go to the topology.

        Rows to the topology wait in Spark, with the open batch.
        """
        if not self._emits:
            # After an error a query may still run that this task has no handle of, or one of the
            # task before it: :meth:`_keep_query` finds and stops them.
            is_stopped = self._stop_query()
            self._halting = not is_stopped and bool(self._code or self._session)
            self._retry_at = 0.0

    def activate(self) -> None:
        """Let the query restart."""
        self._halting = False
        self._retry_at = 0.0

    def _on_clock(self) -> None:
        # next_tuple() is not called while the topology is inactive: the query is stopped here.
        if self._halting:
            self._keep_query()

    def _writer(self, frame: Any) -> Any:
        """The ``DataStreamWriter`` with the sink of the arguments, or with that of a spout."""
        if self._emits:
            writer = super()._writer(frame)
        elif self.each_batch:
            archive = self._archive_to_ship()
            function = make_batch_function(self.each_batch, self.batch_args, archive)
            writer = frame.writeStream.foreachBatch(function)
        else:
            writer = frame.writeStream.format(self.format or "parquet")
        if self.path:
            writer = writer.option("path", self.path)
        return writer.options(**self.options).outputMode(self.output_mode)

    def _run(self, writer: Any) -> Any:
        return writer.toTable(self.table) if self.table else writer.start()


def make_batch_function(
    reference: str, args: Mapping[str, Any], archive: bytes
) -> Callable[[Any, int], None]:
    """Create the ``foreachBatch`` function that calls ``module:function``.

    The function is in the topology's archive. It is nested so that Spark ships it by value.
    """
    load = make_loader(archive)

    def each_batch(frame: Any, batch_id: int) -> None:
        load(reference)(frame, batch_id, **dict(args))

    return each_batch
