"""Sources and sinks: what stands between a topology and the systems that it reads from and writes to.

Importing this package imports no client library: each module imports its own when a task opens.
"""
