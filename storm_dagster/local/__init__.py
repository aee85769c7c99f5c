"""Topologies that run in one process, without a cluster: ``storm-dagster run``."""
