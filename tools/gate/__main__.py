"""Runs the checks of the project in steps, and reports where the time goes.

    python tools/gate run       `make test`: the checks that changes since the last run need, and a share
    python tools/gate plan      the steps of `run`, which do not run
    python tools/gate all       `make test-all`: all checks and all shares
    python tools/gate report    `make gate-report`: the steps of the last run, and the slowest files and tests
    python tools/gate record    `make gate-record`: the seconds of the tests, for the division into shares

Each step is a target of the Makefile. It starts with a line that has the time of day and the minutes since
the start; its seconds, processor seconds and status are in `target/reports/steps.json`. The first step that
fails ends the run.

`run` compares the checkout with the last commit whose run has passed, and `areas.toml` has the tests that
each changed path needs; without such a commit, all tests run. Rare tests are divided into shares, of which
`run` has one: the share of the current commit, or SHARE.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import areas
import record
import report
import steps
from steps import Step

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import shares  # needs no other package

if TYPE_CHECKING:
    from collections.abc import Callable


def share_of_commit() -> int:
    """The share to run: that of the variable SHARE, or of the current commit."""
    chosen = os.environ.get("SHARE", "")
    if not chosen:
        return int(areas.head()[:8], 16) % shares.NUM_SHARES
    if not chosen.isdigit() or int(chosen) >= shares.NUM_SHARES:
        sys.exit(f"SHARE={chosen}: shares are numbers from 0 to {shares.NUM_SHARES - 1}")
    return int(chosen)


def steps_of(need: areas.Need, share: int) -> list[Step]:
    """The steps of a run, the tests of Python last."""
    tests = " ".join(f"tests/{name}" for name in need.tests)
    part = " ".join(["--own", f"--share {share}", *(f"--whole {folder}" for folder in need.whole)])
    python = Step("test-python", (f"TESTS={tests}", f"PART={part}"))
    rare = [Step(unit) for unit in shares.targets_of(share)] if need.is_everything else []
    return [*checks(need), *rare, python]


def checks(need: areas.Need) -> list[Step]:
    """The steps before the tests of Python, some of which run beside others."""
    beside = {other: step for step, other in areas.TABLE["beside"].items() if {step, other} <= {*need.steps}}
    return [Step(step, beside=beside.get(step)) for step in need.steps if step not in beside.values()]


def plan() -> list[Step]:
    """Print what the changes need and the share, and return the steps."""
    need, reason = areas.need_of_checkout()
    share = share_of_commit()
    print(f"gate: {reason}: {', '.join(need.tests)}")
    print(f"gate: share {share} of {shares.NUM_SHARES} of the rare tests; SHARE={share} make test repeats it")
    return steps_of(need, share)


def run() -> None:
    """Run what the changes need, and one share of the rare tests."""
    commit, is_clean = areas.head(), areas.is_clean()
    steps.run(plan())
    if is_clean and areas.is_clean() and areas.head() == commit:
        areas.record_passed(commit)


def run_all() -> None:
    """Run all checks, those that take too long for a share, then each share."""
    all_steps = [*checks(areas.everything()), Step("test-python"), *map(Step, areas.TABLE["long"])]
    for share in range(shares.NUM_SHARES):
        all_steps += [Step(unit) for unit in shares.targets_of(share)]
        variables = (f"PART=--share {share}", f"REPORT=python-share-{share}")
        all_steps.append(Step("test-python", variables, shares.SHARE_SECONDS))
    steps.run(all_steps)


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="gate", description=(__doc__ or "").partition("\n")[0])
    commands: dict[str, Callable[[], object]] = {
        "plan": lambda: print(*(step.command for step in plan()), sep="\n"),
        "run": run,
        "all": run_all,
        "report": lambda: print("\n".join(report.lines())),
        "record": record.write,
    }
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args().command]()


if __name__ == "__main__":
    main()
