"""``python -m storm_simulation``: run seeds, replay one, or look for what mutants break (``make
simulate``).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from itertools import count
from pathlib import Path

from storm_simulation.threads import THREADS

_BUGS = (AttributeError, TypeError, NameError, AssertionError, LookupError)


class Unexpected(logging.Handler):
    """Errors of programming that a loop of the product logs before it goes on: as bad as a thread
    that ends by them.
    """

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _BUGS) and THREADS.kernel is not None:
            THREADS.kernel.crashes.append("".join(traceback.format_exception(error)))


def main() -> int:
    """Run what the command line says; 1 when an invariant broke."""
    parser = argparse.ArgumentParser(prog="storm_simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one seed, and print what happened")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--faults",
        type=int,
        help="run seeds until so many faults, and a hundredth of it of each kind",
    )
    parser.add_argument(
        "--kept", type=Path, help="file in which the sums are kept, for a run that continues them"
    )
    parser.add_argument(
        "--secs", type=float, default=120.0, help="virtual seconds of faults for each seed"
    )
    parser.add_argument(
        "--mutants",
        nargs="?",
        const="",
        help="plant the bugs whose name holds this (all), one after the other",
    )
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of text are walked in the order of their hashes: the same seed must give the same
        # run.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "storm_simulation", *sys.argv[1:]])
    if given.verbose:
        logging.basicConfig(level="INFO", format="%(name)s %(message)s")
    else:
        logging.disable(logging.WARNING)
        logging.getLogger().addHandler(Unexpected())
    if given.mutants is not None:
        return _mutants(given.mutants, given.first, given.seeds, given.secs)
    from storm_simulation.program import run_seed
    from storm_simulation.tally import Tally

    first = given.first if given.seed is None else given.seed
    tally = Tally.load(given.kept, first) if given.kept else Tally(first)
    first = tally.next_seed
    seeds = (
        count(first)
        if given.faults
        else range(first, first + (given.seeds if given.seed is None else 1))
    )
    for seed in seeds:
        result = run_seed(seed, given.secs)
        tally.add(result)
        if given.seed is not None:
            print("\n".join(result.log))
        print(
            f"seed {seed}: {result.digest}, {result.virtual_secs:.0f} virtual s in {result.cpu_secs:.1f} s, "
            f"{sum(result.faults.values())} faults, {result.commits} commits"
        )
        if result.violation:
            print(f"VIOLATION {result.violation}\n  replay: {result.replay}")
        if given.faults and tally.seeds % 20 == 0:
            print(tally.text())
        if given.kept:
            tally.save(given.kept)
        sys.stdout.flush()
        if given.faults and tally.reached(given.faults):
            break
    print(tally.text())
    return 1 if tally.broken else 0


def _mutants(which: str, first: int, seeds: int, secs: float) -> int:
    from storm_simulation.cluster import install
    from storm_simulation.program import run_seed

    install()
    from storm_simulation.mutants import MUTANTS, missing

    assert not missing(), f"mutants replace what is gone: {missing()}"
    missed = 0
    for mutant in MUTANTS:
        if not any(part in mutant.name for part in which.split("|")):
            continue
        found, cpu = "", 0.0
        for seed in range(first, first + seeds):
            with mutant.planted():
                result = run_seed(seed, secs)
            cpu += result.cpu_secs
            if result.violation:
                found = f"seed {seed}: {result.violation}"
                break
        expected = bool(found) and found.partition(": ")[2].split()[0].rstrip(
            ":"
        ) in mutant.invariant.split("|")
        missed += not found
        state = "MISSED" if not found else "caught" if expected else "caught by another rule"
        print(f"{state} ({cpu:.0f} s) {mutant.name}: {found[:230]}", flush=True)
    print(f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
