"""The HTTP service of nimbus (design 6.5)."""
