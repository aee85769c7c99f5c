"""A whole local cluster, whose daemons are children of one process."""
