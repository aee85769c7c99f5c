"""Randomized chaos run: rounds of a word count, CLI verbs and faults, each ending with a check of
the invariants.

A round: a word count is submitted (under a fault or not), one fault after the other is injected
while it counts and while a background topology is submitted, rebalanced, restarted or killed beside
it; then all lines must be counted, every word exactly, I1 to I8 hold, and no operation on the
background topology be left half done.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.chaos import cut_off as cut_off
from storm_rigs.chaos import ensemble_faults as ensemble_faults
from storm_rigs.chaos.faults import Fault, FaultContext, all_faults
from storm_rigs.chaos.workload import WordCount

_Log = Callable[[str], None]

_TYPED_EXITS = frozenset({0, 2, 3, 4, 5})
"""Exit codes of results and typed errors; 1 is an unexpected error and 6 damage."""
_HEAL_SECS = 240.0
_TARGET_SECS = 30.0
"""Time that a fault waits for a target: right after a submission there is no worker yet."""


@dataclass
class ChaosReport:
    """Injected faults, responses and violations of a run."""

    seed: int
    rounds: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    """Fault -> number of times that it hit something."""
    violations: list[str] = field(default_factory=list)
    """Broken invariants, wrong counts, lost lines, untyped errors. Must be empty."""
    answers: Counter[str] = field(default_factory=Counter)
    """``verb: exit code`` of verbs that were run during faults."""
    recovery_secs: dict[str, list[float]] = field(default_factory=dict)
    """Fault -> from the end of each until all tasks of the word count were seen running."""
    exact: int = 0
    """Word counts whose every word had exactly its count."""

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Rows of the table: fault, number of hits, recovery (median and longest, seconds)."""
        for name in sorted(self.injected):
            taken = sorted(self.recovery_secs.get(name, ()))
            middle, most = (
                (f"{taken[len(taken) // 2]:.1f}", f"{taken[-1]:.1f}") if taken else ("-", "-")
            )
            yield name, str(self.injected[name]), middle, most

    def to_document(self) -> dict[str, Any]:
        """The JSON form."""
        ordered = sorted(secs for taken in self.recovery_secs.values() for secs in taken)
        return {
            "seed": self.seed,
            "rounds": self.rounds,
            "exact_counts": self.exact,
            "faults": sum(self.injected.values()),
            "injected": dict(sorted(self.injected.items())),
            "answers": dict(sorted(self.answers.items())),
            "recovery_secs": {
                "median": round(ordered[len(ordered) // 2], 1) if ordered else None,
                "max": round(ordered[-1], 1) if ordered else None,
            },
            "violations": self.violations,
        }


class ChaosRun:
    """Chaos on one cluster. ``faults`` (default: all registered that the cluster allows) are drawn
    by ``seed``.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        workload: WordCount,
        *,
        seed: int,
        log: _Log,
        faults: Mapping[str, Fault] | None = None,
        faults_per_round: int = 4,
    ) -> None:
        self.cluster, self.workload, self.log = cluster, workload, log
        self.random = random.Random(seed)
        self.report = ChaosReport(seed)
        self.faults: Sequence[Fault] = [
            each for each in (faults or all_faults()).values() if each.needs(cluster)
        ]
        self._per_round = faults_per_round
        self._submissions = 0

    def run(self, *, rounds: int | None = None, seconds: float | None = None) -> ChaosReport:
        """Run that many rounds, or as many as begin within ``seconds``; end early when an invariant
        broke.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while (rounds is None or self.report.rounds < rounds) and (
            deadline is None or time.monotonic() < deadline
        ):
            self.report.rounds += 1
            self.round(self.report.rounds)
            if self.report.violations:
                break
        return self.report

    def round(self, number: int) -> None:
        """Run one round."""
        name, background = f"count-{number}", f"background-{number}"
        # With the same token it is the same submission, also when its first run is only slow.
        self._run_verb("submit", *self._submission(name), under=self._maybe_fault())
        if not self._exists(name):
            # It failed: submit it again, as a person would.
            self._wait_until(f"submitting {name} again", lambda: self._submit_again(name))
        for _ in range(self._per_round):
            fault = self.random.choice(self.faults)
            verb, *arguments = self._background_verb(background)
            self._run_verb(verb, *arguments, under=fault, counting=name)
        self._wait_until(f"all lines of {name}", lambda: self.workload.finished(self.cluster, name))
        wrong = self.workload.wrong_words(self.cluster, name)
        if wrong:
            self._record_violation(f"{name}: {wrong} words have a wrong count")
        else:
            self.report.exact += 1
            self.log(f"{name}: every word counted exactly")
        self._check_invariants()
        for each in (name, background):
            self._wait_until(f"killing {each}", lambda each=each: self._kill(each))

    # -- faults ------------------------------------------------------------------------------------
    def _maybe_fault(self) -> Fault | None:
        return self.random.choice(self.faults) if self.random.random() < 0.5 else None

    def _run_verb(
        self, verb: str, *arguments: str, under: Fault | None, counting: str | None = None
    ) -> None:
        """Run a verb and inject a fault meanwhile; then ``counting`` must run again."""
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "storm_dagster",
                verb,
                "--json",
                "--home",
                str(self.cluster.home),
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            if under is not None:
                time.sleep(self.random.uniform(0, 3))
                hit = self._inject(under)
                if counting is not None:
                    self._recover(counting, under.name if hit else None)
            try:
                out, err = process.communicate(timeout=400)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                self._record_violation(
                    f"{verb} {' '.join(arguments[:2])} did not answer within 400 s"
                )
                return
        self.report.answers[f"{verb}: {process.returncode}"] += 1
        if process.returncode not in _TYPED_EXITS:
            self._record_violation(
                f"{verb} ended with {process.returncode}: {(out or err).strip()[-300:]}"
            )
        elif process.returncode:
            self.log(f"{verb} {arguments[0]}: {process.returncode} {out.strip()[-200:]}")

    def _inject(self, fault: Fault) -> bool:
        """Inject the fault, waiting for a target for a while; whether it hit one."""
        deadline = time.monotonic() + _TARGET_SECS
        while True:
            with fault.inject(FaultContext(self.cluster, self.random)) as hit:
                if hit is not None:
                    self.report.injected[fault.name] += 1
                    self.log(f"{fault.name}: {hit}")
            if hit is not None:
                return True
            if time.monotonic() >= deadline:
                self.log(f"{fault.name}: nothing to hit")
                return False
            time.sleep(0.5)

    def _background_verb(self, background: str) -> list[str]:
        """A verb on the background topology, or its submission when it does not exist."""
        if not self._exists(background):
            self._submissions += 1
            return [
                "submit",
                *self.workload.submit_arguments(background, workers=1),
                "--token",
                f"{background}-{self._submissions}",
            ]
        return self.random.choice(
            [
                ["rebalance", background, "-w", "0", "-n", str(self.random.randint(1, 3))],
                ["rebalance", background, "-w", "1", "--reassign"],
                ["restart", background],
                ["update", background, str(self.workload.target)],
                ["deactivate", background],
                ["activate", background],
                ["kill", background, "-w", "0"],
            ]
        )

    # -- checks afterwards -------------------------------------------------------------------------
    def _recover(self, name: str, after: str | None) -> None:
        began = time.monotonic()

        def running() -> bool:
            shown = self.cluster.show(name)
            return bool(shown["tasks"]) and all(
                task["status"] == "running" for task in shown["tasks"]
            )

        if self._wait_until(f"all tasks of {name} running", running) and after is not None:
            self.report.recovery_secs.setdefault(after, []).append(time.monotonic() - began)

    def _check_invariants(self) -> None:
        """Record the violations that ``doctor --invariants`` reports."""
        done = self.cluster.cli("doctor", "--invariants", check=False, timeout=200)
        try:
            document = json.loads(done.out)
        except ValueError:
            self._record_violation(
                f"doctor --invariants printed {done.out[-300:]!r} {done.err[-300:]!r}"
            )
            return
        for violation in document.get("violations", ()):
            self._record_violation(
                f"{violation['invariant']} {violation['thing']}: {violation['reason']}"
            )
        if "error" in document:
            self._record_violation(f"doctor --invariants: {document['error']['message']}")

    def _exists(self, name: str) -> bool:
        return eventually(
            lambda: (any(row["name"] == name for row in self.cluster.topologies()),),
            _HEAL_SECS,
            "a response of nimbus",
            ignore=(StormDagsterError,),
            interval=0.5,
        )[0]

    def _submit_again(self, name: str) -> bool:
        done = self.cluster.cli("submit", *self._submission(name), check=False, timeout=400)
        self.report.answers[f"submit: {done.code}"] += 1
        if done.code:
            self.log(f"submit {name} again: {done.code} {done.out.strip()[-200:]}")
        return self._exists(name)

    def _submission(self, name: str) -> list[str]:
        return [*self.workload.submit_arguments(name), "--token", name]

    def _kill(self, name: str) -> bool:
        if self._exists(name):
            self.cluster.cli("kill", name, "-w", "0", check=False, timeout=200)
        return not self._exists(name)

    def _wait_until(self, what: str, holds: Callable[[], bool]) -> bool:
        try:
            eventually(holds, _HEAL_SECS, what, ignore=(StormDagsterError,), interval=0.5)
        except AssertionError as error:
            self._record_violation(str(error))
            return False
        return True

    def _record_violation(self, what: str) -> None:
        self.report.violations.append(what)
        self.log(f"VIOLATION {what}")
