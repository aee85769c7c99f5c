"""Resources of a cluster: ZooKeeper, nimbus, Spark, supervisors, workers."""
