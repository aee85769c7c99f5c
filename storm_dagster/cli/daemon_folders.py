"""Folders of daemons in HOME, on a disk that may be full or read-only."""

import logging
import tempfile
from pathlib import Path

from storm_dagster.host.files import probe_writing
from storm_dagster.model.errors import Unavailable

_log = logging.getLogger(__name__)


def check_room(folder: Path) -> None:
    """Check that ZooKeeper can write its data below the folder; :class:`Unavailable` if not.

    It acknowledges only writes that are on its disk, so that without room it cannot serve.
    """
    error = _folder_error(folder)
    if error is not None:
        raise Unavailable(
            f"{folder} cannot be written ({error.strerror}), and ZooKeeper keeps the cluster's "
            "state there: free some space, or make the disk writable"
        )


def spark_folder(home: Path) -> Path:
    """Folder of the Spark Connect server: that of HOME, or a temporary one if the disk refuses it.

    It holds only what the server needs while it runs.
    """
    folder = home / "spark"
    error = _folder_error(folder)
    if error is None:
        return folder
    temporary = Path(tempfile.mkdtemp(prefix="storm-spark-"))
    _log.warning("%s cannot be written (%s): Spark uses %s", folder, error.strerror, temporary)
    return temporary


def _folder_error(folder: Path) -> OSError | None:
    """Make the folder, and try to write in it; the error, if there is one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error
    return probe_writing(folder)
