"""Decisions of the data plane: acks, state, windows and load."""
