"""The code location: a declared topology and the batch assets on it.

    cd examples && dagster dev -m streams_and_batch.definitions

The cluster is the one of STORM_DAGSTER_HOME; STREAMS_LAKE is the folder that stream and batch
share.
"""

import os
from pathlib import Path

import dagster as dg

from storm_dagster import build_storm_resources

os.environ.setdefault("STREAMS_LAKE", "/tmp/lake")


@dg.definitions
def defs() -> dg.Definitions:
    """Definitions of `defs/`, with the resources of the cluster."""
    loaded = dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    return dg.Definitions.merge(loaded, dg.Definitions(resources=build_storm_resources()))
