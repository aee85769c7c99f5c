"""Exit codes of a worker process, by which its supervisor decides."""

EXIT_STOPPED = 0
"""The worker was stopped (SIGTERM)."""
EXIT_SUPERSEDED = 3
"""The assignment no longer names the worker's slot, or another process holds the slot: the worker
is not restarted unchanged.
"""
