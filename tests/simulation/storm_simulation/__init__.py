"""Deterministic simulation of a whole cluster: the product's own threads in one process, in virtual
time, under faults.

What went wrong in the control plane before, and what sees it now (``rule`` and ``mutant`` are of
this program):

====================================================  =================================================================
healing waited for copies of its explanation          mutant "what is dead waits for copies of the reasons";
                                                      ``nimbus/test_missing_copies.py``
a frozen follower stalled blob writes                 ``blobstore/test_replication.py``
a sensor that hangs disarmed the backstop             mutant "the leader never heals", faults of services;
                                                      ``nimbus/test_leader_work.py``
a run was lost with its code server                   ``code_server/test_forked_runs.py``
an update undid what was acknowledged                 rule "acknowledged", mutant "the name is not looked at again
                                                      before publishing"; ``operations/test_interference.py``
reads grew with topologies x supervisors              rule I8; ``operations/test_costs.py``, ``dagster/test_schedules.py``,
                                                      ``blobstore/test_local_store.py``
watches leaked                                        rule I3, mutant "supervisors watch what is gone"
an empty assignment made supervisors spin             ``operations/test_costs.py``
one duty kept another from being done                 fault "disk broken" with rule "liveness"; ``nimbus/test_leader_work.py``
two supervisors with one id                           ``supervisor/test_supervisor.py``
a full disk ended workers                             fault "disk full"; ``supervisor/test_supervisor.py``
growth without bound                                  rule I3; ``dagster/test_bounded_runs.py``,
                                                      ``operations/test_cleaner.py``
losses one after the other passed the guard           ``core/test_liveness.py``
resigning deleted the next leader                     mutant "who resigns deletes whoever leads"; ``zk/test_leadership.py``
the last copy of a blob was dropped                   rules I3 and I4; ``nimbus/test_high_availability.py``
wall clocks decided, deferring never ended            fault "wall clock jumps"; ``nimbus/test_leader_priority.py``,
                                                      ``core/test_submission_rules.py``
readers showed the old code after an upgrade          ``operations/test_gray_upgrade.py``
a new slot did not end healing's back-off             ``core/test_worthwhile_attempts.py``
the listener missed an activation                     ``nimbus/test_action_listener.py``
limits per topology, components without tasks         ``core/test_submission_rules.py``, ``operations/test_submission.py``
a healed worker was moved again                       ``operations/test_healing.py``
a daemon stayed on an old address                     fault "address moves", mutant "a daemon stays where its name was";
                                                      ``nimbus/test_election.py``
a submission outlived its client's timeout            ``nimbus/test_high_availability.py``
a worker kept tasks that went with its session        ``operations/test_task_owners.py``
a host that flapped caused a run every ten seconds    rule "runs", mutants "healing tries again whenever something
                                                      changes", "every cause is new when it comes back";
                                                      ``core/test_worthwhile_attempts.py``
what died in a pause of healing was moved in it       rule "pause", mutant "healing does not know its pause";
                                                      ``operations/test_healing_pause.py``
runs that came after the leader counted as none       rule "runs", mutant "a late run is taken for one that moved tasks";
                                                      ``core/test_worthwhile_attempts.py``
a sensor that asks for no run went unnoticed          rule "healer", mutant "the sensor sees and does nothing"
free slots of the cluster counted for a topology      ``core/test_usable_slots.py``, ``operations/test_isolation.py``
====================================================  =================================================================
"""
