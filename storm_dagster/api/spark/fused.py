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
    nested so that Spark ships it by value. It raises what the import or the access to the name
    raises.
    """
    # Reference -> function; "" -> the file of the archive, which keeps it open.
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
    chain: Mapping[str, Any], archive: bytes, counts_prefix: str
) -> Callable[[Any, int], list[tuple[str, Any]]]:
    """Create the function that runs the bolts of a chain on a micro-batch.

    ``chain`` is the value of ``CHAIN_KEY`` that ``model.fusion.fuse`` makes, with the ``columns``
    of the query's frame that have the spout's fields. The function returns (stream, Arrow table)
    pairs for the worker: rows that components outside of the chain read, and for each bolt its
    counts of the batch, as JSON. Their stream is ``counts_prefix`` and the name of the bolt, or
    ``counts_prefix`` alone for the counts of the spout, if its rows become no tuples. A bolt whose
    function raises ends the batch; the error names the bolt. Rows between bolts that
    ``topology.spark.fuse.counts`` leaves out are not counted: Spark optimizes across such bolts.

    The function is nested so that Spark ships it by value.
    """
    load = make_loader(archive)
    batch_class = _make_batch_class()
    read_inputs = _make_input_reader()
    check_result = _make_result_check()

    def run(frame: Any, batch_id: int) -> list[tuple[str, Any]]:
        """Run the bolts on a micro-batch, in their order; return the tables for the worker."""
        # It runs beside the Spark server, without this module: it imports all that it uses.
        import inspect
        import json as json_
        import time
        from collections import Counter as Counts
        from types import SimpleNamespace

        import pyarrow

        parts = chain["parts"]
        # Component -> number of bolts of the chain that read its rows.
        readers: Counts[str] = Counts()
        for part in parts:
            readers.update(part["sources"])
        # A classic session blocks on the value of an observation until an action has made it.
        can_observe = "connect" in type(frame).__module__
        batch = batch_class(readers, can_observe)

        def apply(part: Mapping[str, Any]) -> None:
            """Run a bolt's function, and register its result, if it has one."""
            input_frame = read_inputs(part, batch.frames, frame.sparkSession)
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
            selected = result.select(*part["outputs"])
            batch.add(part["name"], selected, part["stream"], counted=part["counted"])

        began = time.perf_counter_ns()
        # Bolt -> duration of its function and of the actions that its result needed.
        nanos: dict[str, int] = {}
        try:
            rows_of_root = frame.select(*chain["columns"]).toDF(*chain["fields"])
            batch.add(chain["root"], rows_of_root, "default" if chain["emits"] else "")
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
            batch.read_observations()
        finally:
            batch.unpersist()
        rows = batch.rows

        def report(stream: str, **values: Any) -> None:
            batch.tables.append((stream, pyarrow.table({"counts": [json_.dumps(values)]})))

        for part in parts:
            name = part["name"]
            executed: dict[str, int] = {}
            for source in part["sources"]:
                if source in rows:
                    executed[f"{source}:default"] = rows[source]
            # The rows of a stream are counted when the bolt's tasks in the workers emit them.
            emitted = 0 if part["stream"] else rows.get(name, 0)
            report(counts_prefix + name, executed=executed, emitted=emitted, nanos=nanos[name])
        if not chain["emits"]:
            report(counts_prefix, rows=rows[chain["root"]], nanos=time.perf_counter_ns() - began)
        return batch.tables

    return run


def _make_batch_class() -> type[Any]:
    """Create the class of the results in one micro-batch of a chain.

    It is nested so that Spark ships it by value.
    """

    class Batch:
        """Results of the components of a chain, and the numbers of their rows."""

        def __init__(self, readers: Mapping[str, int], can_observe: bool) -> None:
            self.frames: dict[str, Any] = {}
            """Component -> its result; missing if its function returned none."""
            self.rows: dict[str, Any] = {}
            """Component -> number of its rows, or the observation that has it.

            Missing for rows that are not counted.
            """
            self.tables: list[tuple[str, Any]] = []
            """(stream, Arrow table) for the worker."""
            self._persisted: list[Any] = []
            self._readers = readers
            self._can_observe = can_observe

        def add(self, name: str, result: Any, stream: str, *, counted: bool = True) -> None:
            """Register a result, and count its rows; a stream sends it to the worker."""
            from pyspark.sql import Observation, functions

            readers = self._readers[name]
            uses = readers + bool(stream)
            # Persisted if it is read twice: by two users, or by one and by the count() below.
            if uses > 1 or (readers and counted and not self._can_observe):
                result = result.persist()
                self._persisted.append(result)
            if stream:
                table = result.toArrow()
                self.tables.append((stream, table))
                self.rows[name] = table.num_rows
            elif readers and not counted:
                # topology.spark.fuse.counts is false: no action of its own.
                pass
            elif readers == 1 and self._can_observe:
                # Counted while the reader's action reads the rows.
                self.rows[name] = Observation()
                count = functions.count(functions.lit(1)).alias("rows")
                result = result.observe(self.rows[name], count)
            else:
                # Without a reader and a stream this is the only action that computes the rows.
                self.rows[name] = result.count()
            self.frames[name] = result

        def read_observations(self) -> None:
            """Replace the observations by their numbers, after the actions of all bolts."""
            for name, number in self.rows.items():
                if isinstance(number, int):
                    continue
                if number.get:
                    self.rows[name] = number.get["rows"]
                else:
                    # No action has read the rows, so that the observation is empty.
                    self.rows[name] = self.frames[name].count()

        def unpersist(self) -> None:
            """Release the memory that Spark keeps for the results."""
            for result in self._persisted:
                result.unpersist()

    return Batch


def _make_input_reader() -> Callable[[Mapping[str, Any], Mapping[str, Any], Any], Any]:
    """Create the function that makes the input of a bolt from the results of its sources.

    It is nested so that Spark ships it by value.
    """
    # Bolt -> its schema. Computed once: every access to columns is a request to Spark.
    structs: dict[str, Any] = {}

    def read_inputs(part: Mapping[str, Any], frames: Mapping[str, Any], session: Any) -> Any:
        """The rows of a bolt's sources, in the columns of its schema.

        ``frames`` are the results by component. ``None`` if no source has a result.
        """
        from pyspark.sql import functions

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
            struct = session.createDataFrame([], part["schema"]).schema
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

    return read_inputs


def _make_result_check() -> Callable[[Mapping[str, Any], Any], None]:
    """Create the function that checks the columns of a bolt's result.

    It is nested so that Spark ships it by value.
    """
    # Bolts whose result was checked: only once, since access to columns is a request to Spark.
    checked: set[str] = set()

    def check_result(part: Mapping[str, Any], result: Any) -> None:
        """Raise ``ValueError`` if the first result of a bolt does not have its outputs."""
        if part["name"] in checked:
            return
        columns = getattr(result, "columns", None) or type(result).__name__
        if not part["outputs"] or not set(part["outputs"]) <= set(columns):
            raise ValueError(
                f"it returns {columns}, the bolt declares {part['outputs']}: "
                "return a DataFrame with these columns, or None"
            )
        checked.add(part["name"])

    return check_result
