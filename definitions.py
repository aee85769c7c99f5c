"""The code location: everything is defined in :mod:`storm_dagster.defs`, this file only names
it.
"""

from storm_dagster.defs import defs

__all__ = ["defs"]
