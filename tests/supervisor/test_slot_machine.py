"""The slot state machine: Storm's transitions, back-off, and what holds after any events at all."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storm_dagster.core.slots.machine import crash_delay, is_restarting, step
from storm_dagster.core.slots.model import (
    Assigned,
    Beat,
    Clean,
    CodeFailed,
    CodeReady,
    Event,
    Exited,
    Fetch,
    Instruction,
    Kill,
    Launch,
    Launched,
    LaunchFailed,
    Report,
    SlotLimits,
    SupervisedSlot,
    Terminate,
    Tick,
    Work,
    Worker,
)

LIMITS = SlotLimits(start_timeout=120, silence_timeout=30, kill_after=3)
A = Work("a-1-1", "a-1-1")
A2 = Work("a-1-1", "a-1-1-v2")
B = Work("b-2-1", "b-2-1")


@dataclass
class Driver:
    """Feeds one slot with events and records its instructions."""

    slot: SupervisedSlot = field(default_factory=lambda: SupervisedSlot(6900))
    now: float = 1000.0
    number: int = 0

    def send(self, event: Event, after: float = 0.0) -> tuple[Instruction, ...]:
        self.now += after
        self.slot, instructions = step(self.slot, event, self.now, LIMITS)
        return instructions

    def launched(self) -> str:
        assert self.slot.wanted is not None
        self.number += 1
        self.send(Launched(Worker(f"w{self.number}", self.slot.wanted)))
        return f"w{self.number}"

    def run(self, work: Work = A) -> str:
        self.send(Assigned(work))
        assert self.send(CodeReady(work.code_dir)) == (Launch(work),)
        worker = self.launched()
        self.send(Beat(worker), after=0.5)
        assert self.slot.state == "running"
        return worker


def test_an_empty_slot_without_work_stays_empty() -> None:
    driver = Driver()
    for _ in range(3):
        assert driver.send(Tick(), after=1) == ()
        assert driver.slot.state == "empty"
    assert driver.send(Assigned(None)) == ()


def test_work_takes_an_empty_slot_to_running() -> None:
    driver = Driver()
    assert driver.send(Assigned(A)) == (Fetch("a-1-1"),)
    assert driver.slot.state == "waiting-for-code"
    assert driver.send(Tick(), after=1) == ()  # asked for once only
    assert driver.send(CodeReady("a-1-1")) == (Launch(A),)
    assert driver.slot.state == "waiting-for-start"
    assert driver.send(Tick(), after=1) == ()  # nor launched twice
    worker = driver.launched()
    assert driver.slot.state == "waiting-for-start"
    driver.send(Beat(worker))
    assert driver.slot.state == "running"
    for _ in range(5):
        assert driver.send(Beat(worker), after=20) == ()
        assert driver.send(Tick()) == ()
        assert driver.slot.state == "running"


def test_a_failed_fetch_is_tried_again_after_three_seconds_or_dropped() -> None:
    driver = Driver()
    driver.send(Assigned(A))
    assert driver.send(CodeFailed("a-1-1", "no nimbus answers")) == ()
    assert driver.slot.reason == "no nimbus answers"
    assert driver.send(Tick(), after=2.9) == ()
    assert driver.send(Tick(), after=0.2) == (Fetch("a-1-1"),)
    driver.send(CodeFailed("a-1-1", "no nimbus answers"))
    driver.send(Assigned(None))
    assert driver.slot.state == "empty"
    assert driver.send(Tick(), after=10) == ()


def test_a_lasting_failure_is_reported_once_and_tried_again_slowly() -> None:
    driver = Driver()
    driver.send(Assigned(A))
    failed = CodeFailed("a-1-1", "entry '../x' points outside", lasting=True)
    assert driver.send(failed) == (Report("a-1-1", failed.reason),)
    assert driver.send(Tick(), after=59) == ()
    assert driver.send(Tick(), after=2) == (Fetch("a-1-1"),)
    assert driver.send(failed) == ()
    # another topology in this slot is not held back by it
    assert driver.send(Assigned(B)) == (Fetch("b-2-1"),)


def test_a_crashed_worker_is_restarted_at_once() -> None:
    driver = Driver()
    worker = driver.run()
    instructions = driver.send(Exited(worker, -9), after=1)
    assert instructions[:2] == (Clean(worker), Launch(A))
    assert instructions[2:] == (Report("a-1-1", "its worker was ended by signal 9"),)
    assert driver.slot.state == "waiting-for-start"
    assert is_restarting(driver.slot)
    driver.send(Beat(driver.launched()))
    assert driver.slot.state == "running"
    assert not is_restarting(driver.slot)


def test_back_off_grows_and_a_stable_minute_resets_it() -> None:
    assert [crash_delay(n, LIMITS) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5000)] == [
        *(0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60)
    ]
    driver = Driver()
    worker = driver.run()
    delays = []
    for _ in range(5):
        instructions = driver.send(Exited(worker, 1))
        delay = 0.0
        while Launch(A) not in instructions:
            delay += 0.5
            instructions = driver.send(Tick(), after=0.5)
        delays.append(delay)
        worker = driver.launched()
        driver.send(Beat(worker))
    assert delays == [0, 1, 2, 4, 8]
    driver.send(Beat(worker), after=61)
    assert Launch(A) in driver.send(Exited(worker, 1))
    assert driver.slot.crashes == 1


def test_a_worker_that_dies_before_its_first_beat_counts_as_crashed() -> None:
    driver = Driver()
    driver.send(Assigned(A))
    driver.send(CodeReady(A.code_dir))
    assert Launch(A) in driver.send(Exited(driver.launched(), 1))
    assert not is_restarting(driver.slot)  # it never ran
    assert Launch(A) not in driver.send(Exited(driver.launched(), 1))


def test_a_failed_launch_backs_off_and_is_reported_once() -> None:
    driver = Driver()
    driver.send(Assigned(A))
    driver.send(CodeReady(A.code_dir))
    failed = LaunchFailed(A, "topology.python '/nowhere' does not exist")
    assert driver.send(failed) == (Report("a-1-1", failed.reason), Launch(A))
    assert driver.send(failed) == ()
    assert driver.send(Tick(), after=1) == (Launch(A),)
    missing = LaunchFailed(A, "its code is gone", code_missing=True)
    assert driver.send(missing) == (Fetch("a-1-1"),)
    assert driver.slot.state == "waiting-for-code"


def test_a_failed_launch_of_former_work_does_not_accuse_the_next() -> None:
    driver = Driver()
    driver.send(Assigned(A))
    assert driver.send(CodeReady(A.code_dir)) == (Launch(A),)
    driver.send(Assigned(B))
    driver.send(CodeReady(B.code_dir))
    assert driver.send(LaunchFailed(A, "A cannot be started")) == (Launch(B),)
    assert (driver.slot.crashes, driver.slot.reason) == (0, "")


def test_another_topology_ends_the_process_and_fetches_meanwhile() -> None:
    driver = Driver()
    worker = driver.run()
    assert driver.send(Assigned(B)) == (Terminate(worker), Fetch("b-2-1"))
    assert driver.slot.state == "killing"
    assert not is_restarting(driver.slot)
    assert driver.send(CodeReady("b-2-1")) == ()  # not before the old one is dead
    assert driver.send(Tick(), after=2) == ()
    assert driver.send(Tick(), after=1.1) == (Kill(worker),)
    assert driver.send(Tick(), after=1) == ()
    assert driver.send(Tick(), after=5) == (Kill(worker),)
    assert driver.send(Exited(worker, -9)) == (Clean(worker), Launch(B))
    driver.send(Beat(driver.launched()))
    assert driver.slot.state == "running"
    assert driver.slot.crashes == 0


def test_nothing_wanted_ends_the_process() -> None:
    driver = Driver()
    worker = driver.run()
    assert driver.send(Assigned(None)) == (Terminate(worker),)
    assert driver.slot.state == "killing"
    assert driver.send(Exited(worker, 0)) == (Clean(worker),)
    assert driver.slot.state == "empty"


def test_new_code_is_fetched_while_the_old_runs() -> None:
    driver = Driver()
    worker = driver.run()
    assert driver.send(Assigned(A2)) == (Fetch("a-1-1-v2"),)
    assert driver.slot.state == "waiting-for-update"
    assert not is_restarting(driver.slot)
    assert driver.send(Beat(worker), after=10) == ()
    # a fetch that fails leaves the old one alone
    assert driver.send(CodeFailed("a-1-1-v2", "no nimbus")) == ()
    assert driver.send(Tick(), after=3.1) == (Fetch("a-1-1-v2"),)
    assert driver.send(CodeReady("a-1-1-v2")) == (Terminate(worker),)
    assert driver.slot.state == "killing-to-relaunch"
    assert is_restarting(driver.slot)
    assert driver.send(Exited(worker, 0)) == (Clean(worker), Launch(A2))
    driver.send(Beat(driver.launched()))
    assert (driver.slot.state, driver.slot.crashes) == ("running", 0)


def test_an_update_that_is_taken_back_leaves_the_process_alone() -> None:
    driver = Driver()
    driver.run()
    driver.send(Assigned(A2))
    assert driver.send(Assigned(A)) == ()
    assert driver.slot.state == "running"
    assert driver.send(CodeReady("a-1-1-v2")) == ()


def test_a_crash_while_new_code_is_fetched_starts_the_new_code() -> None:
    driver = Driver()
    worker = driver.run()
    driver.send(Assigned(A2))
    assert Launch(A) not in driver.send(Exited(worker, -9))
    assert driver.slot.state == "waiting-for-code"
    assert driver.send(CodeReady("a-1-1-v2")) == (Launch(A2),)


def test_the_same_work_changes_nothing() -> None:
    driver = Driver()
    driver.run()
    before = driver.slot
    assert driver.send(Assigned(Work("a-1-1", "a-1-1")), after=5) == ()
    assert driver.slot == before


def test_an_assignment_that_comes_back_while_killing_is_relaunched() -> None:
    driver = Driver()
    worker = driver.run()
    driver.send(Assigned(None))
    assert driver.send(Assigned(A)) == ()  # its code is still here
    assert driver.slot.state == "killing-to-relaunch"
    assert driver.send(Exited(worker, 0)) == (Clean(worker), Launch(A))


def test_a_change_while_a_process_is_being_started_waits_for_it() -> None:
    driver = Driver()
    driver.send(Assigned(A))
    driver.send(CodeReady(A.code_dir))
    assert driver.send(Assigned(B)) == (Fetch("b-2-1"),)
    assert driver.send(CodeReady("b-2-1")) == ()  # an answer is outstanding: no second process
    assert driver.send(Launched(Worker("w9", A))) == (Terminate("w9"),)
    assert driver.send(Exited("w9", -15)) == (Clean("w9"), Launch(B))


def test_a_superseded_worker_is_no_crash() -> None:
    driver = Driver()
    worker = driver.run()
    assert driver.send(Exited(worker, 3)) == (Clean(worker),)
    assert driver.slot.crashes == 0
    assert driver.send(Tick(), after=0.5) == ()
    assert driver.send(Tick(), after=0.6) == (Launch(A),)  # still named: the next one reads again


def test_a_worker_stopped_by_someone_else_comes_back_after_a_pause() -> None:
    driver = Driver()
    worker = driver.run()
    assert driver.send(Exited(worker, 0)) == (Clean(worker),)
    assert driver.send(Tick(), after=1.1) == (Launch(A),)


@pytest.mark.parametrize(("beats", "silence"), [(True, 30.5), (False, 120.5)])
def test_a_hung_worker_is_ended_and_relaunched(beats: bool, silence: float) -> None:
    driver = Driver()
    driver.send(Assigned(A))
    driver.send(CodeReady(A.code_dir))
    worker = driver.launched()
    if beats:
        driver.send(Beat(worker))
    assert driver.send(Tick(), after=silence - 1) == ()
    instructions = driver.send(Tick(), after=1)
    assert instructions[0] == Terminate(worker)
    assert isinstance(instructions[1], Report)
    assert driver.slot.state == "killing-to-relaunch"
    assert driver.send(Beat(worker)) == ()  # a late beat does not save it
    assert driver.send(Tick(), after=3.1) == (Kill(worker),)
    assert driver.send(Exited(worker, -9)) == (Clean(worker), Launch(A))
    assert driver.slot.crashes == 1


def test_found_processes_are_adopted_running() -> None:
    driver = Driver()
    driver.send(Assigned(A))
    assert driver.send(Launched(Worker("w1", A), beating=True)) == ()
    assert driver.slot.state == "running"
    # a second one in the same slot is not tolerated
    assert driver.send(Launched(Worker("w2", A), beating=True)) == (Kill("w2"),)
    assert driver.slot.worker == Worker("w1", A)
    assert Fetch("a-1-1") not in driver.send(Tick())


def test_late_answers_about_other_processes_change_nothing() -> None:
    driver = Driver()
    driver.run()
    before = driver.slot
    for event in (
        Exited("old", 1),
        Beat("old"),
        LaunchFailed(A, "late"),
        CodeFailed("x", "y"),
        CodeReady("x"),
    ):
        assert driver.send(event) == ()
    assert driver.slot == before


WORKS = st.sampled_from([None, A, A2, B])


class AnyEvents(RuleBasedStateMachine):
    """Random events of a correct but slow system: late responses, processes that die at any
    time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slot = SupervisedSlot(6900)
        self.now = 0.0
        self.alive: dict[str, Work] = {}
        self.to_launch: list[Work] = []
        self.to_fetch: list[str] = []
        self.disk: set[str] = set()
        self.termed: set[str] = set()
        self.count = 0

    def feed(self, event: Event) -> tuple[Instruction, ...]:
        wanted_before, worker_before = self.slot.wanted, self.slot.worker
        self.slot, instructions = step(self.slot, event, self.now, LIMITS)
        for instruction in instructions:
            if isinstance(instruction, Launch):
                assert not self.alive and not self.to_launch, "a second process in the slot"
                assert instruction.work == self.slot.wanted
                assert instruction.work.code_dir in self.disk
                self.to_launch.append(instruction.work)
            elif isinstance(instruction, Fetch):
                # Asked for twice at most when the wish went away and came back; one fetch answers
                # both.
                if instruction.code_dir not in self.to_fetch:
                    self.to_fetch.append(instruction.code_dir)
            elif isinstance(instruction, Terminate | Kill):
                assert instruction.worker_id in self.alive
                self.termed.add(instruction.worker_id)
                if isinstance(event, Assigned):
                    assert worker_before is not None and event.work != worker_before.work
                    assert event.work != wanted_before
            elif isinstance(instruction, Clean):
                assert instruction.worker_id not in self.alive
        return instructions

    @rule(work=WORKS)
    def assign(self, work: Work | None) -> None:
        self.feed(Assigned(work))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.5, 31.0, 130.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @precondition(lambda self: self.to_fetch)
    @rule(good=st.booleans(), lasting=st.booleans())
    def fetch_ends(self, good: bool, lasting: bool) -> None:
        code = self.to_fetch.pop(0)
        if good:
            self.disk.add(code)
        self.feed(CodeReady(code) if good else CodeFailed(code, "failed", lasting))

    @precondition(lambda self: self.to_launch)
    @rule(good=st.booleans())
    def launch_ends(self, good: bool) -> None:
        work = self.to_launch.pop()
        if not good:
            self._launch_fails(work)
            return
        self.to_launch.append(work)
        self._launch()

    def _launch_fails(self, work: Work) -> None:
        """Feed the failure; only the topology that failed is accused, and only it is delayed."""
        before = self.slot
        instructions = self.feed(LaunchFailed(work, "failed"))
        accused = {each.topology_id for each in instructions if isinstance(each, Report)}
        assert accused <= {work.topology_id}
        if before.wanted != work:
            assert (self.slot.crashes, self.slot.reason) == (before.crashes, before.reason)

    @precondition(lambda self: self.alive)
    @rule()
    def beat(self) -> None:
        self.feed(Beat(next(iter(self.alive))))

    @precondition(lambda self: self.alive)
    @rule(status=st.sampled_from([0, 1, 3, -9, None]))
    def die(self, status: int | None) -> None:
        worker = next(iter(self.alive))
        del self.alive[worker]
        self.feed(Exited(worker, status))

    @invariant()
    def shape(self) -> None:
        slot = self.slot
        assert {slot.worker.id} == set(self.alive) if slot.worker else not self.alive
        if slot.state == "empty":
            assert slot.worker is None and slot.wanted is None and not slot.launching
        if slot.state in ("running", "waiting-for-update", "killing", "killing-to-relaunch"):
            assert slot.worker is not None and not slot.launching
        if slot.state == "running":
            assert slot.worker is not None and slot.wanted == slot.worker.work
        if slot.state == "killing" and slot.worker is not None:
            assert slot.wanted is None or slot.wanted.topology_id != slot.worker.work.topology_id
        if slot.launching:
            assert slot.worker is None and slot.state == "waiting-for-start"
        if is_restarting(slot):
            assert slot.wanted is not None

    def teardown(self) -> None:
        """From any state, without further faults, the desired worker runs, and no other."""
        for wanted in (self.slot.wanted, None):
            self.feed(Assigned(wanted))
            for _ in range(40):
                self.now += 4.0
                while self.to_fetch:
                    self.disk.add(self.to_fetch[0])
                    self.feed(CodeReady(self.to_fetch.pop(0)))
                if self.to_launch:
                    self._launch()
                for worker in list(self.alive):
                    if worker in self.termed:
                        del self.alive[worker]
                        self.feed(Exited(worker, -15))
                    else:
                        self.feed(Beat(worker))
                self.feed(Tick())
            assert self.slot.state == ("running" if wanted is not None else "empty"), self.slot

    def _launch(self) -> None:
        self.count += 1
        work = self.to_launch.pop()
        self.alive[f"w{self.count}"] = work
        self.feed(Launched(Worker(f"w{self.count}", work)))


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(stateful_step_count=40)


@given(
    st.lists(
        st.sampled_from(
            [
                *(
                    Assigned(None),
                    Assigned(A),
                    Assigned(A2),
                    Assigned(B),
                    Tick(),
                    LaunchFailed(A, "x"),
                ),
                *(CodeReady(A.code_dir), CodeReady(A2.code_dir), CodeFailed(A.code_dir, "x")),
                *(
                    Launched(Worker("w1", A)),
                    Launched(Worker("w2", B)),
                    Launched(Worker("w1", A), beating=True),
                ),
                *(Beat("w1"), Beat("w2"), Exited("w1", 1), Exited("w2", 3)),
            ]
        ),
        max_size=30,
    )
)
def test_no_sequence_of_events_however_absurd_breaks_it(events: list[Event]) -> None:
    driver = Driver()
    for event in events:
        driver.send(event, after=0.7)
        slot = driver.slot
        assert (slot.state == "empty") <= (slot.worker is None and slot.wanted is None)
        assert not (slot.launching and slot.worker is not None)


def test_crash_counts_of_an_earlier_supervisor_continue_for_equal_work_only() -> None:
    driver = Driver(slot=SupervisedSlot(6900, crashes=4, counted=A))
    driver.run()
    assert driver.slot.crashes == 4
    assert Launch(A) not in driver.send(Exited("w1", 1))
    assert driver.slot.not_before == driver.now + crash_delay(5, LIMITS)
    other = Driver(slot=SupervisedSlot(6900, crashes=4, counted=A))
    other.run(B)
    assert other.slot.crashes == 0
