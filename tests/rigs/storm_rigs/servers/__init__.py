"""What daemons stand on, as processes of a test: ZooKeeper, Spark, Kafka, PostgreSQL, networks, ports."""
