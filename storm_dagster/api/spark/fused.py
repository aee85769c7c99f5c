"""Chains of Spark components in one query.

A function beside Spark runs the bolts of a chain for each micro-batch; their tasks in the worker
emit the rows that other components read.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.fusion import FUSED, FUSED_COUNTS, OTHER_WAY


class FusedBolt(Bolt):
    """Bolt whose function runs in a query.

    Its tasks emit the rows that other components read, and count the batches.
    """

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Begin with no counts."""
        self.counts: list[dict[str, Any]] = []
        """Counts of batches, until the runner has added them to its statistics."""

    def process(self, tup: Tuple) -> None:
        """Emit a row, or store the counts of a batch.

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
    """Create the function that loads functions from the topology's archive.

    It is called with ``"module:function"``.

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
            # The file exists until the process ends: Spark kills the process, and removes the
            # folders of SPARK_LOCAL_DIRS.
            folders = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
            existing = [folder for folder in folders if os.path.isdir(folder)]
            folder = existing[0] if existing else None
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

    ``chain`` is the value of the worker's conf (``model.fusion``). The function returns the
    (stream, Arrow table) pairs for the worker: rows that components outside of the chain read, and
    for each bolt the ``counts`` of the batch, as JSON. A bolt whose function raises ends the batch;
    the error names the bolt. Rows between bolts that ``topology.spark.fuse.counts`` leaves out are
    not counted: Spark optimizes across such bolts.
    """
    load = make_loader(archive)
    # Computed once for each bolt: every access to columns is a request to Spark.
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

        # A classic session blocks on the value of an observation until an action has made it.
        can_observe = "connect" in type(frame).__module__
        parts = chain["parts"]
        # Component -> number of bolts of the chain that read its rows.
        readers: Counts[str] = Counts()
        for part in parts:
            readers.update(part["sources"])
        frames: dict[str, Any] = {}
        # Component -> number of its rows, or the observation that has it.
        rows: dict[str, Any] = {}
        persisted: list[Any] = []
        tables: list[tuple[str, Any]] = []

        def add(name: str, result: Any, stream: str, *, counted: bool = True) -> None:
            """Register a result, and count its rows; a stream sends it to the worker."""
            uses = readers[name] + bool(stream)
            if uses > 1 or (readers[name] and counted and not can_observe):
                result = result.persist()
                persisted.append(result)
            if stream:
                table = result.toArrow()
                tables.append((stream, table))
                rows[name] = table.num_rows
            elif readers[name] and not counted:
                pass
            elif readers[name] == 1 and can_observe:
                rows[name] = Observation()
                result = result.observe(rows[name], functions.count(functions.lit(1)).alias("rows"))
            else:
                rows[name] = result.count()
            frames[name] = result

        def inputs(part: Mapping[str, Any]) -> Any:
            """The rows of a bolt's sources, in the columns of its schema.

            ``None`` if no source has a result.
            """
            union: Any = None
            for source in part["sources"]:
                if source not in frames:
                    continue
                if union is None:
                    union = frames[source]
                elif part["schema"]:
                    union = union.union(frames[source])
                else:
                    # Without a schema only the names tell which columns belong together.
                    union = union.unionByName(frames[source])
            if union is None or not part["schema"]:
                return union
            struct = structs.get(part["name"])
            if struct is None:
                struct = frame.sparkSession.createDataFrame([], part["schema"]).schema
                if len(struct) != len(union.columns):
                    raise ValueError(
                        f"it takes {len(struct)} columns ({', '.join(struct.names)}), "
                        f"its rows have {union.columns}: name as many in schema"
                    )
                structs[part["name"]] = struct
            renamed = union.toDF(*struct.names)
            columns: list[Any] = []
            for field in struct:
                column = functions.col(f"`{field.name}`")
                columns.append(column.cast(field.dataType).alias(field.name))
            return renamed.select(*columns)

        def check_result(part: Mapping[str, Any], result: Any) -> None:
            """Check the columns of a result once for each bolt."""
            if part["name"] in checked:
                return
            columns = getattr(result, "columns", None) or type(result).__name__
            if not part["outputs"] or not set(part["outputs"]) <= set(columns):
                raise ValueError(
                    f"it returns {columns}, the bolt declares {part['outputs']}: "
                    "return a DataFrame with these columns, or None"
                )
            checked.add(part["name"])

        def apply(part: Mapping[str, Any]) -> None:
            """Run a bolt's function, and register its result."""
            input_frame = inputs(part)
            if input_frame is None:
                return
            args = dict(part["args"])
            function = load(part["function"])
            if "context" in list(inspect.signature(function).parameters)[1:]:
                args["context"] = SimpleNamespace(batch_id=str(batch_id), component=part["name"])
            result = function(input_frame, **args)
            if result is None:
                return
            check_result(part, result)
            add(
                part["name"],
                result.select(*part["outputs"]),
                part["stream"],
                counted=part["counted"],
            )

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
                    lines = str(error).splitlines()
                    first_line = lines[0] if lines else ""
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
                    # No action has read the rows, so that the observation is empty.
                    rows[name] = frames[name].count()
        finally:
            for persisted_frame in persisted:
                persisted_frame.unpersist()

        def report(stream: str, **values: Any) -> None:
            tables.append((stream, pyarrow.table({"counts": [json_.dumps(values)]})))

        for part in parts:
            name = part["name"]
            executed: dict[str, int] = {}
            for source in part["sources"]:
                if source in rows:
                    executed[f"{source}:default"] = rows[source]
            emitted = 0 if part["stream"] else rows.get(name, 0)
            report(counts + name, executed=executed, emitted=emitted, nanos=nanos[name])
        if not chain["emits"]:
            report(counts, rows=rows[chain["root"]], nanos=time.perf_counter_ns() - began)
        return tables

    return run
