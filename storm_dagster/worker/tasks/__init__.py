"""Tasks: runners of spouts and bolts, their threads, subprocesses, state and statistics."""
