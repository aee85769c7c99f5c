"""Clusters for tests: every role at the level that a test needs, with one conf.

:class:`~storm_rigs.stage.builder.Stage` starts the roles on one root in ZooKeeper and ends them in
reverse order. The fixtures ``stage`` and ``module_stage`` (``tests/conftest.py``) make it. ::

    nimbus = stage.nimbus(nimbus__monitor__backstop__secs=1).await_leading()
    rig = stage.workers(builder, {"lines": "1", "__topology_master": "2"}, code=CODE)

The levels: **records** that a daemon would write, the real code in **threads** of this process, and
real **processes**. What is not a method of ``Stage`` is a context manager or a function that takes
the stage, so that a test imports only what it uses.

=============  ======================  ===========================  ===============================
role           records                 threads                      processes
=============  ======================  ===========================  ===============================
ZooKeeper      --                      --                           ``EmbeddedZooKeeper`` (the
                                                                    fixture ``zookeeper_server``),
                                                                    ``ZooKeeperEnsemble``
nimbus         ``world().lead()``      ``nimbus()``                 ``Daemons``
supervisor     ``world()               ``LinkedSupervisor``: its    ``supervisors()``, with stand-ins
               .supervisor()``         link to ZooKeeper;           for workers; ``Daemons``
                                       ``log_service()``: its HTTP
worker         ``world()               ``LocalWorkers``             ``workers()``
               .run_workers()``
operations     --                      ``world().submit()``,        ``Actor``
                                       ``.context()``
code location  --                      ``dagster_world()``          ``StockDagster``
webserver      --                      --                           ``serve_dagster()``,
                                                                    ``dagster_web()``
blob server    --                      ``serve_blobs()``            a nimbus
Spark          ``PlainPlanner``        --                           ``SparkServer`` (the fixture
                                                                    ``spark_remote``)
users, secret  keys of the conf        keys of the conf             keys of the conf
=============  ======================  ===========================  ===============================

Compositions: ``served_topology`` is a nimbus, a supervisor's HTTP service and the workers of one
topology. A whole cluster with Dagster and Spark is the package's own
:class:`storm_dagster.testing.cluster.LocalCluster` (the fixture ``shared_cluster``).
"""
