"""What a killed process leaves behind in virtual time: no memory, and nothing that its threads do
while they unwind.
"""

from __future__ import annotations

import gc
import weakref

from storm_simulation.kernel import Host, Kernel, Process


class _Held:
    """What a thread holds."""


def test_a_killed_process_is_freed_and_its_last_acts_have_no_effect() -> None:
    kernel = Kernel(7)
    host = Host("h1", files={"kept": 1, "below": {"kept": 2}})
    victim, other = Process(kernel, "victim", host), Process(kernel, "other", host)
    held: list[weakref.ref[_Held]] = []
    heard: list[object] = []
    waiting = []

    def listen() -> None:
        waiting.append(kernel.waiter())
        heard.append(waiting[0].wait(60))

    def work() -> None:
        mine = _Held()
        held.append(weakref.ref(mine))
        try:
            kernel.sleep(1_000)
        finally:
            host.files["kept"], host.files["below"]["more"] = 9, 9
            waiting[0].fire("from the dead")
            kernel.after(0, heard.append, "an event")
            Process(kernel, "child", host).spawn(lambda: heard.append("a child"))
            kernel.rng.random()

    other.spawn(listen)
    victim.spawn(work)
    kernel.run(1)
    chance, pid = kernel.rng.getstate(), kernel.last_pid
    victim.kill()
    kernel.at(2, lambda: None)
    kernel.run(50)
    gc.collect()
    assert held[0]() is None
    assert host.files == {"kept": 1, "below": {"kept": 2}} and not heard
    assert (kernel.rng.getstate(), kernel.last_pid, kernel.crashes) == (chance, pid, [])
    waiting[0].fire("from the living")
    kernel.run(51)
    assert heard == ["from the living"]
    kernel.close()
