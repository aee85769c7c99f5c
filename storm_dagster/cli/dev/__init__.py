"""A whole local cluster as the child processes of one: start, watch, restart, end."""
