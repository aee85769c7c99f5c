"""``make chaos``: faults on a real local cluster, drawn by a seed, while lifecycle verbs run.

    python tests/chaos/run.py --rounds 3            or --minutes 20, --seed N, --faults "worker killed,leader killed"

Prints each fault, then a table (faults injected, recovery), answers and violations; with --json one
document in place of the table. Exit 1 with a violation.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from storm_dagster.testing.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "rigs"))

from storm_rigs.chaos.cut_off import ProxiedNimbus  # noqa: E402
from storm_rigs.chaos.faults import all_faults  # noqa: E402
from storm_rigs.chaos.rounds import ChaosReport, ChaosRun  # noqa: E402
from storm_rigs.chaos.workload import WordCount  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument(
        "--faults", default=None, help=f"comma separated, of: {', '.join(all_faults())}"
    )
    parser.add_argument("--supervisors", type=int, default=3)
    parser.add_argument(
        "--nimbuses", type=int, default=2, help="besides the one that can be cut off"
    )
    parser.add_argument("--zookeepers", type=int, default=3, choices=(1, 3, 5))
    parser.add_argument("--limit", type=int, default=4000, help="lines of each word count")
    parser.add_argument("--home", type=Path, default=None, help="keep the cluster's files there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    faults = dict(all_faults())
    if options.faults:
        faults = {name: faults[name] for name in options.faults.split(",")}
    began = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    home = options.home or Path(tempfile.mkdtemp(prefix="storm-dagster-chaos-"))
    log(f"seed {options.seed}; cluster in {home}")
    workload = WordCount(ROOT / "examples" / "wordcount.py", limit=options.limit)
    sound = False
    try:
        with (
            LocalCluster(
                home / "home",
                supervisors=options.supervisors,
                slots=4,
                nimbuses=options.nimbuses,
                zookeepers=options.zookeepers,
                timeout=600,
            ) as cluster,
            ProxiedNimbus(cluster),
        ):
            chaos_run = ChaosRun(cluster, workload, seed=options.seed, log=log, faults=faults)
            rounds = options.rounds if options.rounds or options.minutes else 1
            report = chaos_run.run(
                rounds=rounds, seconds=None if options.minutes is None else 60 * options.minutes
            )
        sound = not report.violations
        seconds = time.monotonic() - began
        if options.json:
            print(json.dumps({**report.to_document(), "seconds": round(seconds, 1)}, indent=2))
        else:
            show(report, seconds)
    finally:
        if sound and options.home is None:
            shutil.rmtree(home, ignore_errors=True)
    return 0 if sound else 1


def show(report: ChaosReport, seconds: float) -> None:
    """The report as Markdown."""
    print("| fault | injected | recovery s, median | longest |\n|---|---|---|---|")
    for row in report.rows():
        print(f"| {' | '.join(row)} |")
    answers = ", ".join(f"{answer} ({times})" for answer, times in sorted(report.answers.items()))
    print(f"\nanswers while faults went on (verb: exit code): {answers}")
    print(
        f"seed {report.seed}: {report.rounds} rounds, {report.exact} exact word counts, "
        f"{sum(report.injected.values())} faults, {len(report.violations)} violations, {seconds:.0f} s"
    )
    for violation in report.violations:
        print(f"VIOLATION {violation}")


if __name__ == "__main__":
    sys.exit(main())
