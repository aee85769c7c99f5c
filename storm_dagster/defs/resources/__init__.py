"""Resources that lead to a cluster: ZooKeeper, nimbus, Spark, supervisors, workers."""
