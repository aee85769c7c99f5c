"""Entry point of a worker: ``python -m storm_dagster.worker SPEC.json``."""

import logging
import os
import sys
from pathlib import Path

from storm_dagster.host.imports import quick_imports
from storm_dagster.host.requirements import needs
from storm_dagster.model.errors import MissingPart, StormDagsterError

try:
    with needs("a worker"), quick_imports():
        from storm_dagster.host.worker_spec import SPARE, WORKER_MODULE, WorkerSpec
        from storm_dagster.model.exit_codes import EXIT_SUPERSEDED
        from storm_dagster.worker.runtime.process import run_worker
except MissingPart as missing:
    sys.exit(f"MissingPart: {missing.message}")


def _wait_for_spec(path: Path) -> None:
    """Wait for the spec, then make this process equal to a new one.

    The supervisor starts a spare worker before it has a spec. After this call, the process has the
    files, the folder and the import path of an interpreter that starts now.
    """
    if not sys.stdin.readline():
        os._exit(0)  # The supervisor ended.
    spec = WorkerSpec.read(path)
    log = os.open(spec.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((null, log, log)):
        os.dup2(file, number)
    archive = str(spec.archive_root)
    if sys.path[0] == os.getcwd():
        sys.path[0:1] = [str(path.parent), archive]
    else:
        # With PYTHONSAFEPATH, the folder is not on the path.
        sys.path.insert(0, archive)
    os.chdir(path.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join((archive, os.environ["PYTHONPATH"]))
    shipped = {file.name.partition(".")[0] for file in spec.archive_root.glob("*")}
    if not shipped.isdisjoint({*sys.modules, "sitecustomize", "usercustomize"}):
        # The archive precedes the installed packages, and some of those are imported already.
        os.execv(sys.executable, [sys.executable, "-m", WORKER_MODULE, str(path)])


def main() -> int:
    """Run one worker, and return its exit code."""
    # Started before there is a spec for it.
    is_spare = sys.argv[2:] == [SPARE]
    if len(sys.argv) != 2 and not is_spare:
        sys.stderr.write("usage: python -m storm_dagster.worker SPEC.json\n")
        return 2
    try:
        if is_spare:
            _wait_for_spec(Path(sys.argv[1]))
            del sys.argv[2]
        code = run_worker(Path(sys.argv[1]))
        # The process ends without exit hooks. A worker without Spark components has not loaded
        # this module.
        spark = sys.modules.get("storm_dagster.api.spark.session")
        if spark is not None:
            spark.release_sessions()
        return code
    except StormDagsterError as error:
        sys.stderr.write(f"{type(error).__name__}: {error.message}\n")
        # To the supervisor, EXIT_SUPERSEDED means "no crash". A Conflict has the same code on the
        # command line, and is a crash.
        return error.exit_code if error.exit_code != EXIT_SUPERSEDED else 1
    except Exception:
        logging.getLogger(__name__).exception("the worker failed")
        raise


if __name__ == "__main__":
    code: int = main()
    logging.shutdown()
    # Threads of blocking components must not keep a finished worker alive.
    os._exit(code)
