"""Exit codes of a worker process, by which its supervisor decides."""

EXIT_STOPPED = 0
"""The worker was stopped (SIGTERM)."""
EXIT_SUPERSEDED = 3
"""The assignment names the worker's slot no more, or another process holds its slot: do not restart
it as is.
"""
