"""Servers that daemons need, as processes of a test: ZooKeeper, Spark, Kafka, PostgreSQL,
networks, ports.
"""
