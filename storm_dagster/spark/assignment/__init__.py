"""The PySpark assignment: placement of topologies as a DataFrame computation.

Supervisors and held slots are DataFrames of columns; a topology is a few rows, each with its keys
and one value of ``core.scheduling`` as bytes. Free slots are ranked by a window; slots are
allocated to topologies in order in one Arrow group over workers and supervisors; tasks are assigned
per topology, in parallel. The groups call the rules of ``core.scheduling``, as the local planner
does. The code in Spark's Python workers (``groups`` and its imports) needs only the standard
library, pyarrow and constants of ``model``.
"""
