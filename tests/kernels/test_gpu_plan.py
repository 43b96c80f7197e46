"""The measuring plan of the GPU on the emulated device: its figures, its limits of time, its summary."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.kernels import cuda
from support.paths import ROOT, TESTS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

BENCHES = ROOT / "benches" / "gpu"
#: The most lines of a summary.
LINES = 60


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the benchmark by name."""
    monkeypatch.syspath_prepend(BENCHES)
    return importlib.import_module


def run_plan(out: Path, *options: str) -> tuple[int, list[dict[str, Any]], list[str]]:
    """The status, the figures and the lines of the summary of a plan with small shapes."""
    program = [sys.executable, str(BENCHES / "plan.py"), "--emulated", "--tiny", "--out", str(out)]
    done = subprocess.run([*program, *options], capture_output=True, text=True, check=False)
    lines = (out / "plan.jsonl").read_text().splitlines() if (out / "plan.jsonl").exists() else []
    assert (out / "plan.txt").exists(), done.stdout + done.stderr
    summary = (out / "plan.txt").read_text().splitlines()
    assert len(summary) <= LINES
    assert done.stdout.splitlines()[-len(summary) :] == summary
    return done.returncode, [json.loads(line) for line in lines], summary


def cells_of(summary: list[str], name: str) -> list[str]:
    """The figures of a summary, two in a line, whose names begin so."""
    cells = [cell.strip() for line in summary for cell in line.split(" | ")]
    return [cell for cell in cells if cell.startswith(name)]


def test_facts_are_measured_and_decide(tmp_path: Path) -> None:
    status, figures, summary = run_plan(tmp_path, "--plan", "A", "--minutes", "9")
    assert status == 0, summary
    assert {figure["section"] for figure in figures} == {"bits", "cublas", "memory"}
    found = {figure["name"]: figure for figure in figures}
    for name in (
        "wgmma of 8 columns = mma, 128",
        "operands exchanged, wgmma of 256 columns, 128",
        "today's gemm_warpgroup_widest = one chain",
    ):
        assert found[name]["samples"] == [0]
    assert "YES  wgmma has the bits of mma for every N (8 of 8): a table may choose the tiles" in summary
    # The emulated library divides a sum by the number of rows.
    differing = found["o, 9 rows, algorithms that differ from one chain"]
    assert (differing["samples"], differing["note"]) == ([1], "of 1 algorithms, 1152 sums each")
    assert differing["details"][0]["differences"] > 0
    assert found["o, 9 rows, cost without split-K"]["samples"]
    assert any(line.startswith("NO   cuBLASLt without split-K computes one chain (0 of ") for line in summary)
    assert "OPEN a pair of blocks that shares copies receives more: not measured" in summary
    assert len(found["read, cp.async, all multiprocessors, 16 KiB"]["samples"]) == 5
    assert len(found["boundary, cp.async, launched after the wait"]["samples"]) == 5
    assert found["bulk copies"]["note"] == "skipped: the emulated device has no bulk copies"
    # Figures have their predictions beside them.
    (cell,) = cells_of(summary, "memory: L2, cp.async, ")
    assert cell.split()[-2] == "5.5"


@pytest.mark.rare
def test_attention_and_checks_are_measured(tmp_path: Path) -> None:
    status, figures, summary = run_plan(tmp_path, "--plan", "B2,D,E", "--minutes", "9", "--limits", "torch=0")
    # A section over its limit leaves the figures of the others.
    assert status == 1
    assert "NOT COMPLETE: torch: not started: no time was left" in summary
    assert {figure["section"] for figure in figures} == {
        *("attention", "quantised", "counters", "checks", "racecheck")
    }
    differences = [figure for figure in figures if "differ" in figure["name"]]
    assert len(differences) >= 9
    assert all(figure["samples"] == [0] for figure in differences)
    kernels = {figure["name"].rpartition(", ")[2] for figure in figures if figure["section"] == "attention"}
    assert {"prefill", "prefill_warpgroup", "decode", "decode_wide"} <= kernels
    checks = [figure["samples"] for figure in figures if figure["section"] == "checks"]
    assert checks
    assert all(samples == [0] for samples in checks)
    (counters,) = (figure for figure in figures if figure["section"] == "counters")
    assert counters["note"] == "skipped: ncu is not installed"


@pytest.mark.rare
def test_steps_of_engines_are_measured(tmp_path: Path) -> None:
    status, figures, summary = run_plan(tmp_path, "--plan", "C", "--limits", "int8-kv=0.5")
    assert status == 1
    assert "NOT COMPLETE: int8-kv: stopped after 0 s" in summary
    names = [f"{figure['section']}: {figure['name']}" for figure in figures]
    assert "bf16: decode, batch 1, context 20" in names
    assert "bf16: decode, batch 1, polled" in names
    assert "int4: prefill of 40" in names
    assert "one small layer: step of batch 2, polled" in names
    assert cells_of(summary, "bf16: decode, batch 1, cost of the poll")


@pytest.mark.rare
def test_section_that_hangs_or_fails_is_named(module: Any, tmp_path: Path) -> None:
    sections, rows, report = (module(name) for name in ("sections", "plan_rows", "plan_summary"))
    path = tmp_path / "plan.jsonl"
    begin = f"import json; open({str(path)!r}, 'a').write(json.dumps({{'section': 'S', 'name': 'row', "
    begin += "'unit': 'us', 'samples': [1], 'note': '', 'details': None, 'device': ''}) + '\\n')\n"
    # A child of the section would keep its output open.
    child = "[sys.executable, '-c', 'import signal; signal.pause()']"
    hangs = f"import signal, subprocess, sys\nsubprocess.Popen({child})"
    programs = {
        "hangs": f"{begin}{hangs}\nsignal.pause()",
        "fails": f"{begin}import os; os.abort()",
        "ends": f"{begin}open({str(path)!r}, 'a').write('{{')",
    }
    outcomes = sections.run_sections(
        [sections.Section(name, [sys.executable, "-c", code], 2) for name, code in programs.items()], 1
    )
    assert outcomes == {"hangs": "stopped after 2 s", "fails": "failed with status -6", "ends": "complete"}
    figures = rows.read(path)
    assert [figure.key for figure in figures] == ["S: row"] * 3
    lines = report.summary(["head"], outcomes, figures).splitlines()
    assert lines[:4] == [
        "head",
        "complete: ends",
        "NOT COMPLETE: hangs: stopped after 2 s",
        "NOT COMPLETE: fails: failed with status -6",
    ]
    assert len(lines) <= LINES


def test_summary_of_many_figures_has_the_most_lines(module: Any) -> None:
    rows, report = (module(name) for name in ("plan_rows", "plan_summary"))
    keys = [entry["rows"].replace("*", "x").partition(": ") for entry in rows.tables()["figure"]]
    figures = [rows.Figure(section, name, "us", [3.0, 4.0]) for section, _, name in keys for _ in range(2)]
    outcomes = {f"section {i}": "stopped after 9 s" for i in range(15)}
    lines = report.summary(["head"], outcomes, figures).splitlines()
    assert len(lines) == LINES
    assert max(map(len, lines)) <= report.WIDTH
    assert "more of them with predictions" in lines[-1]


def test_summary_has_the_worst_of_many_figures(module: Any) -> None:
    rows, report = (module(name) for name in ("plan_rows", "plan_summary"))
    name = "second-level cache, bulk copies, {} MiB"
    figures = [
        rows.Figure("memory", name.format(i), "TB/s", [value - 0.1, value, value + 0.1])
        for i, value in enumerate((8.0, 7.9, 7.2, 8.5))
    ]
    summary = report.summary(["head"], {}, figures).splitlines()
    assert any(line.startswith("YES  the second-level cache gives 8 TB/s (4 of 4): ") for line in summary)
    (cell,) = cells_of(summary, "memory: L2, bulk copies, ")
    assert " ".join(cell.split()) == "memory: L2, bulk copies, 2 MiB (4) 7.2 TB/s 1% 8 0.90"


def test_figure_without_a_prediction_decides_nothing(module: Any) -> None:
    rows, report = (module(name) for name in ("plan_rows", "plan_summary"))
    name = "decode, batch 1, context 1000"
    lines = [
        report.summary([], {}, [rows.Figure("int4", name, "tok/s", [340.0], device=device)])
        for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    ]
    question = "int4 gains from its rewrite at batch 1"
    assert f"YES  {question} (1 of 1): " in lines[0]
    assert f"OPEN {question}: no prediction for this card" in lines[1]


def test_line_of_a_process_that_was_ended_is_left_out(module: Any, tmp_path: Path) -> None:
    rows = module("plan_rows")
    path = tmp_path / "plan.jsonl"
    path.write_text('{"section": "memory", "na')
    rows.Figures(path, "memory").figure("read", [1.0, 2.0, 4.0], "TB/s")
    rows.Figures(path, "memory").skipped("write", "no device")
    assert [(f.key, f.value, f.note) for f in rows.read(path)] == [
        ("memory: read", 2.0, ""),
        ("memory: write", None, "skipped: no device"),
    ]


def test_prediction_depends_on_the_card(module: Any) -> None:
    rows = module("plan_rows")
    figures = [
        rows.Figure("memory", "read, bulk copies, all multiprocessors, 192 KiB", "TB/s", [4], device=name)
        for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    ]
    assert [rows.prediction_of(figure).value for figure in figures] == [3.12, 4.3]


#: As ncu prints them: a column for each counter and a line of units, and a row for each counter.
WIDE = """==PROF== Connected to process 17
"ID","Kernel Name","gpu__time_duration.sum","smsp__issue_active.avg.per_cycle_active",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio",\
"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","lts__throughput.avg.pct_of_peak_sustained_elapsed"
"","","usecond","inst/cycle","inst","inst","inst","%","%"
"0","gemm_warpgroup_wide_bf16","158.20","0.45","1.25","2.50","9.0","41.5","60.0"
"1","gemv_bf16","1,087.60","0.25","0.10","0.20","0.0","88.0","n/a"
"""
LONG = """"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","gemv","Speed","gpu__time_duration.sum","ms","1.5"
"0","gemv","Speed","sm__inst_issued.avg.pct_of_peak_sustained_active","%","65.0"
"""


def test_counters_of_ncu_are_read(module: Any) -> None:
    counters = module("plan_counters")
    wide, vector = counters.read(WIDE.splitlines())
    assert wide["gpu__time_duration.sum"] == pytest.approx(158_200)
    assert counters.figures_of(wide) == {"issue slots": 45.0, "memory": 41.5, "second-level cache": 60.0}
    assert counters.stalls_of(wide) == "wait 2.50, barrier 1.25"
    assert vector["gpu__time_duration.sum"] == pytest.approx(1_087_600)
    (long,) = counters.read(LONG.splitlines())
    assert counters.figures_of(long) == {"issue slots": 65.0}
    assert long["gpu__time_duration.sum"] == pytest.approx(1.5e6)
    assert counters.read(["==ERROR== no permission"]) == []


@pytest.mark.rare
def test_kernels_of_the_plan_are_compiled_beforehand(tmp_path: Path) -> None:
    # In a process of its own, which finds the folder in its environment.
    code = "import plan_kernels, pathlib, sys; plan_kernels.prepare(pathlib.Path(sys.argv[1]), archive=False)"
    folders = [str(BENCHES), str(TESTS), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}\n{code}", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logs = {path.name.partition(".")[0]: path.read_text() for path in (tmp_path / "cubins").glob("*.log")}
    for probe in (BENCHES / "probes").glob("*.cu"):
        assert "(C75" not in logs[probe.stem], "products of warpgroups are serialised"
        assert all(used.spilled_bytes == 0 for used in cuda.resources(logs[probe.stem]).values()), probe
    names = {path.name.partition(".")[0] for path in (tmp_path / "cubins").glob("*.cubin")}
    assert {"chains", "ring", "ring_bulk", "latency", "data", "gemm", "attention", "gemm_quantised"} <= names
