"""Cluster state in ZooKeeper. The only package that imports kazoo."""
