"""The submission as a graph of assets."""
