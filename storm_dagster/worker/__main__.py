"""Entry point of a worker: ``python -m storm_dagster.worker SPEC.json``."""

import logging
import os
import sys
from pathlib import Path

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
# Pydantic would search all installed packages for plugins: a tenth of a worker's start. Users' models get theirs back.
_wanted = os.environ.get(_PLUGINS)
os.environ[_PLUGINS] = "__all__"
from storm_dagster.model.errors import MissingPart, StormDagsterError  # noqa: E402
from storm_dagster.model.host import needs  # noqa: E402
from storm_dagster.model.worker_spec import EXIT_SUPERSEDED  # noqa: E402

try:
    with needs("a worker"):
        from storm_dagster.worker.runtime.process import run_worker
except MissingPart as missing:
    sys.exit(f"MissingPart: {missing.message}")

if _wanted is None:
    del os.environ[_PLUGINS]
else:
    os.environ[_PLUGINS] = _wanted


def main() -> int:
    """Run one worker; its exit code."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m storm_dagster.worker SPEC.json\n")
        return 2
    try:
        code = run_worker(Path(sys.argv[1]))
        # Its process ends without exit hooks. A worker without Spark components has not loaded it.
        if (spark := sys.modules.get("storm_dagster.api.spark_session")) is not None:
            spark.release_sessions()
        return code
    except StormDagsterError as error:
        sys.stderr.write(f"{type(error).__name__}: {error.message}\n")
        # EXIT_SUPERSEDED tells the supervisor "no crash"; a Conflict, which has the same code on the command line, is one.
        return error.exit_code if error.exit_code != EXIT_SUPERSEDED else 1
    except Exception:
        logging.getLogger(__name__).exception("the worker failed")
        raise


if __name__ == "__main__":
    code: int = main()
    logging.shutdown()
    # Threads of blocking components must not keep a finished worker alive.
    os._exit(code)
