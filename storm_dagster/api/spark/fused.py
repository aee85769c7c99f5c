"""Chains of Spark components in one query: what runs beside Spark for each micro-batch, and the
bolts that are left.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.fusion import FUSED, FUSED_COUNTS, OTHER_WAY


class FusedBolt(Bolt):
    """A task of a bolt whose function runs in a query: it emits the rows that others read, and
    counts the batches.
    """

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Begin with no counts."""
        self.counts: list[dict[str, Any]] = []
        """Of batches, until the runner has added them to its statistics."""

    def process(self, tup: Tuple) -> None:
        """Emit a row, or take the counts of a batch; :class:`Unavailable` for a tuple of a spout
        that does not fuse.
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
    of the process that runs functions of batches. So it brings the archive along. It is nested so
    that Spark ships it by value.
    """
    loaded: dict[str, Any] = {}

    def load(reference: str) -> Any:
        import importlib
        import operator
        import os
        import sys
        import tempfile

        if archive and not loaded:
            # It lives as long as the process; Spark kills that, and removes its own folders.
            folder = next(
                filter(os.path.isdir, os.environ.get("SPARK_LOCAL_DIRS", "").split(",")), None
            )
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
    """Create the function that runs the bolts of a chain on a micro-batch: ``chain`` is the
    worker's (``model.fusion``).

    It returns the Arrow tables that go to the worker, with their streams: rows that components
    outside read, and for each bolt the ``counts`` of the batch, as JSON. A bolt whose function
    raises ends the batch; the error names it. Rows between bolts that
    ``topology.spark.fuse.counts`` leaves out are not counted: Spark optimizes across such bolts.
    """
    load = make_loader(archive)
    # Of each bolt, once: every question about columns is a request to Spark.
    structs, checked = dict[str, Any](), set[str]()

    def run(frame: Any, batch_id: int) -> list[tuple[str, Any]]:
        import inspect
        import json as json_
        import time
        from collections import Counter as Counts
        from types import SimpleNamespace

        import pyarrow
        from pyspark.sql import Observation, functions

        # A classic session answers a question about an observation only after it was made.
        observes = "connect" in type(frame).__module__
        parts = chain["parts"]
        readers = Counts(source for part in parts for source in part["sources"])
        frames: dict[str, Any] = {}
        rows: dict[str, Any] = {}
        kept: list[Any] = []
        tables: list[tuple[str, Any]] = []

        def add(name: str, result: Any, stream: str, *, counted: bool = True) -> None:
            """Note a result, sending it to the worker if it has a stream, and how its rows are
            counted.
            """
            if readers[name] + bool(stream) > 1 or (readers[name] and counted and not observes):
                result = result.persist()
                kept.append(result)
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
            """What the bolts and the spout before it have made, in the columns of its schema."""
            given = None
            for other in (frames[source] for source in part["sources"] if source in frames):
                # Without a schema its columns have names alone.
                union = given and (given.union if part["schema"] else given.unionByName)
                given = union(other) if union else other
            if given is None or not part["schema"]:
                return given
            types = structs.get(part["name"])
            if types is None:
                types = frame.sparkSession.createDataFrame([], part["schema"]).schema
                if len(types) != len(given.columns):
                    raise ValueError(
                        f"it takes {len(types)} columns ({', '.join(types.names)}), its rows have {given.columns}: name "
                        "as many in schema"
                    )
                structs[part["name"]] = types
            given = given.toDF(*types.names)
            return given.select(
                *[
                    functions.col(f"`{one.name}`").cast(one.dataType).alias(one.name)
                    for one in types
                ]
            )

        def apply(part: Mapping[str, Any]) -> None:
            """Run a bolt's function, and note its result."""
            given, args = inputs(part), dict(part["args"])
            if given is None:
                return
            function = load(part["function"])
            if "context" in [*inspect.signature(function).parameters][1:]:
                args["context"] = SimpleNamespace(batch_id=str(batch_id), component=part["name"])
            result = function(given, **args)
            if result is None:
                return
            if part["name"] not in checked:
                found = getattr(result, "columns", None) or type(result).__name__
                if not part["outputs"] or not {*part["outputs"]} <= {*found}:
                    raise ValueError(
                        f"it returns {found}, the bolt declares {part['outputs']}: return a DataFrame with these columns, "
                        "or None"
                    )
                checked.add(part["name"])
            add(
                part["name"],
                result.select(*part["outputs"]),
                part["stream"],
                counted=part["counted"],
            )

        began, nanos = time.perf_counter_ns(), dict[str, int]()
        try:
            rows_of_root = frame.select(*chain["columns"]).toDF(*chain["fields"])
            add(chain["root"], rows_of_root, "default" if chain["emits"] else "")
            for part in parts:
                start = time.perf_counter_ns()
                try:
                    apply(part)
                except Exception as error:
                    first = (str(error).splitlines() or [""])[0]
                    what = f"component {part['name']!r}: {part['function']}: {type(error).__name__}: {first:.500}"
                    raise RuntimeError(what) from error
                nanos[part["name"]] = time.perf_counter_ns() - start
            for name, number in rows.items():
                if not isinstance(number, int):
                    # Nobody asked for its rows, if nothing was observed.
                    rows[name] = number.get["rows"] if number.get else frames[name].count()
        finally:
            for one in kept:
                one.unpersist()

        def tell(stream: str, **values: Any) -> None:
            tables.append((stream, pyarrow.table({"counts": [json_.dumps(values)]})))

        for part in parts:
            name = part["name"]
            executed = {
                f"{source}:default": rows[source] for source in part["sources"] if source in rows
            }
            emitted = 0 if part["stream"] else rows.get(name, 0)
            tell(counts + name, executed=executed, emitted=emitted, nanos=nanos[name])
        if not chain["emits"]:
            tell(counts, rows=rows[chain["root"]], nanos=time.perf_counter_ns() - began)
        return tables

    return run
