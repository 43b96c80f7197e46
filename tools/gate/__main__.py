"""Runs the checks of the project in steps, and reports where the time goes: `make test`, `make gate-report`.

    python tools/gate run       lint, Rust tests and Python tests
    python tools/gate report    the steps of the last run, the files of tests and the slowest tests

Each step is a target of the Makefile. A step starts with a line that has the time of day and the minutes since
the start; its seconds, processor seconds and status are in `target/reports/steps.json`. The first step that
fails ends the run.
"""

from __future__ import annotations

import argparse

import report
import steps


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="gate", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="run the checks")
    commands.add_parser("report", help="print where the time of the last run went")
    options = parser.parse_args()
    if options.command == "report":
        print("\n".join(report.lines()))
    else:
        steps.run(steps.ALL)


if __name__ == "__main__":
    main()
