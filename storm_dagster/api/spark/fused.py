"""Chains of Spark components in one query.

A function runs beside Spark for each micro-batch; the bolts of the chain are tasks that only emit
its results and count them.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.fusion import FUSED, FUSED_COUNTS, OTHER_WAY


class FusedBolt(Bolt):
    """A task of a bolt whose function runs in a query.

    It emits the rows that other components read, and counts the batches.
    """

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Start without counts."""
        self.counts: list[dict[str, Any]] = []
        """Counts of batches, until the runner has added them to its statistics."""

    def process(self, tup: Tuple) -> None:
        """Emit a row, or keep the counts of a batch.

        Raises :class:`Unavailable` for a tuple of a spout that does not fuse.
        """
        if tup.stream.startswith(FUSED_COUNTS):
            self.counts.append(json.loads(tup.values[0]))
        elif tup.stream.startswith(FUSED):
            self.emit(list(tup.values))
        else:
            raise Unavailable(
                f"component {self.context.component!r} cannot take a tuple: {OTHER_WAY}"
            )


def make_loader(archive: bytes) -> Callable[[str], Any]:
    """Create the function that finds ``"module:function"`` in the topology's archive.

    Beside a Connect server Spark puts a session's archives on the path of Python workers, but not
    of the process that runs functions of batches. So the function contains the archive. It is
    nested so that Spark ships it by value.
    """
    loaded: dict[str, Any] = {}

    def load(reference: str) -> Any:
        import importlib
        import operator
        import os
        import sys
        import tempfile

        if archive and not loaded:
            folder: str | None = None
            for local_dir in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
                if os.path.isdir(local_dir):
                    folder = local_dir
                    break
            # The file stays until Spark kills the process and removes its own folders.
            file: Any = tempfile.NamedTemporaryFile(suffix=".zip", dir=folder)  # noqa: SIM115
            loaded[""] = file
            file.write(archive)
            file.flush()
            sys.path.insert(0, file.name)
        if reference not in loaded:
            module, _, name = reference.partition(":")
            loaded[reference] = operator.attrgetter(name)(importlib.import_module(module))
        return loaded[reference]

    return load


def make_chain(
    chain: Mapping[str, Any], archive: bytes, counts: str
) -> Callable[[Any, int], list[tuple[str, Any]]]:
    """Create the function that runs the bolts of a chain on a micro-batch.

    ``chain`` is the worker's (``model.fusion``). The function returns the Arrow tables that go to
    the worker, with their streams: rows that components outside of the chain read, and for each
    bolt the ``counts`` of the batch, as JSON. A bolt whose function raises ends the batch; the
    error names it. Rows between bolts that ``topology.spark.fuse.counts`` leaves out are not
    counted: Spark optimizes across such bolts.

    It is nested so that Spark ships it by value; that is why it imports modules itself.
    """
    load = make_loader(archive)
    # Kept for each bolt: every query of columns is a request to Spark.
    structs: dict[str, Any] = {}
    checked: set[str] = set()

    def run(frame: Any, batch_id: int) -> list[tuple[str, Any]]:
        import inspect
        import json as json_
        import time
        from collections import Counter as Counts
        from types import SimpleNamespace

        import pyarrow
        from pyspark.sql import Observation, functions

        # A classic session returns an observation only after it was made.
        observes = "connect" in type(frame).__module__
        parts = chain["parts"]
        readers = Counts()
        for part in parts:
            readers.update(part["sources"])
        frames: dict[str, Any] = {}
        rows: dict[str, Any] = {}
        persisted: list[Any] = []
        tables: list[tuple[str, Any]] = []

        def add(name: str, result: Any, stream: str, *, counted: bool = True) -> None:
            """Add a result, and count its rows; with a stream it goes to the worker."""
            if readers[name] + bool(stream) > 1 or (readers[name] and counted and not observes):
                result = result.persist()
                persisted.append(result)
            if stream:
                table = result.toArrow()
                tables.append((stream, table))
                rows[name] = table.num_rows
            elif readers[name] and not counted:
                pass
            elif readers[name] == 1 and observes:
                rows[name] = Observation()
                result = result.observe(rows[name], functions.count(functions.lit(1)).alias("rows"))
            else:
                rows[name] = result.count()
            frames[name] = result

        def inputs(part: Mapping[str, Any]) -> Any:
            """The union of its sources' results, in the columns of its schema."""
            combined: Any = None
            for source in part["sources"]:
                if source not in frames:
                    continue
                if combined is None:
                    combined = frames[source]
                elif part["schema"]:
                    combined = combined.union(frames[source])
                else:
                    # Without a schema, columns are matched by name.
                    combined = combined.unionByName(frames[source])
            if combined is None or not part["schema"]:
                return combined
            types = structs.get(part["name"])
            if types is None:
                types = frame.sparkSession.createDataFrame([], part["schema"]).schema
                if len(types) != len(combined.columns):
                    raise ValueError(
                        f"it takes {len(types)} columns ({', '.join(types.names)}), its rows have "
                        f"{combined.columns}: name as many in schema"
                    )
                structs[part["name"]] = types
            combined = combined.toDF(*types.names)
            columns = []
            for field in types:
                column = functions.col(f"`{field.name}`").cast(field.dataType)
                columns.append(column.alias(field.name))
            return combined.select(*columns)

        def apply(part: Mapping[str, Any]) -> None:
            """Run a bolt's function, and add its result."""
            input_frame = inputs(part)
            if input_frame is None:
                return
            args = dict(part["args"])
            function = load(part["function"])
            if "context" in [*inspect.signature(function).parameters][1:]:
                args["context"] = SimpleNamespace(batch_id=str(batch_id), component=part["name"])
            result = function(input_frame, **args)
            if result is None:
                return
            if part["name"] not in checked:
                returned = getattr(result, "columns", None) or type(result).__name__
                if not part["outputs"] or not {*part["outputs"]} <= {*returned}:
                    raise ValueError(
                        f"it returns {returned}, the bolt declares {part['outputs']}: return a "
                        "DataFrame with these columns, or None"
                    )
                checked.add(part["name"])
            outputs = result.select(*part["outputs"])
            add(part["name"], outputs, part["stream"], counted=part["counted"])

        began = time.perf_counter_ns()
        nanos: dict[str, int] = {}
        try:
            rows_of_root = frame.select(*chain["columns"]).toDF(*chain["fields"])
            add(chain["root"], rows_of_root, "default" if chain["emits"] else "")
            for part in parts:
                start = time.perf_counter_ns()
                try:
                    apply(part)
                except Exception as error:
                    first_line = (str(error).splitlines() or [""])[0]
                    raise RuntimeError(
                        f"component {part['name']!r}: {part['function']}: "
                        f"{type(error).__name__}: {first_line:.500}"
                    ) from error
                nanos[part["name"]] = time.perf_counter_ns() - start
            for name, number in rows.items():
                if isinstance(number, int):
                    continue
                if number.get:
                    rows[name] = number.get["rows"]
                else:
                    # Without an observation its rows were not read.
                    rows[name] = frames[name].count()
        finally:
            for result in persisted:
                result.unpersist()

        def add_counts(stream: str, **values: Any) -> None:
            tables.append((stream, pyarrow.table({"counts": [json_.dumps(values)]})))

        for part in parts:
            name = part["name"]
            executed = {
                f"{source}:default": rows[source] for source in part["sources"] if source in rows
            }
            emitted = 0 if part["stream"] else rows.get(name, 0)
            add_counts(counts + name, executed=executed, emitted=emitted, nanos=nanos[name])
        if not chain["emits"]:
            total_nanos = time.perf_counter_ns() - began
            add_counts(counts, rows=rows[chain["root"]], nanos=total_nanos)
        return tables

    return run
