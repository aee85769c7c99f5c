"""Servers that daemons need, as processes of a test: ZooKeeper, Spark, Kafka.

PostgreSQL, networks with faults and free ports are here too.
"""
