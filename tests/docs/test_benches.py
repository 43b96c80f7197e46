"""The benchmark suite: its report, and a turn of Penstock on a small model; the measured load generator."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.api.checkpoints import make_config, write_checkpoint
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SUITE = ROOT / "benches" / "suite"
LIMITS = {"read": 40e9, "f32": 200e9, "bf16": 400e9, "int8": 800e9, "int4": 800e9}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SUITE)
    return importlib.import_module("report")


def write_record(file: Path, values: dict[str, dict[str, list[float]]]) -> Path:
    """A record of the case int8: row, engine, the values of rounds 1, 2 and so on."""
    measurements = [
        {"case": "int8", "round": number, "date": "2026-11-22 12:00", "limits": LIMITS}
        | {"row": row, "engine": engine, "value": value}
        for row, engines in values.items()
        for engine, rounds in engines.items()
        for number, value in enumerate(rounds, 1)
    ]
    engines = {"int8/penstock": {"weight_bytes": 500_000_000, "isa": "avx2"}}
    data = {"cpu": "a CPU", "threads": 2, "versions": {}, "kernels": [], "engines": engines}
    file.write_text(json.dumps(data | {"measurements": measurements}))
    return file


def test_limit_is_the_slower_of_bytes_and_operations(report: Any, tmp_path: Path) -> None:
    rows = {"decode-1": {"penstock": [60.0]}, "decode-32": {"penstock": [600.0]}}
    record = report.Record(write_record(tmp_path / "suite.json", rows))
    assert record.limit("int8", "decode-1") == pytest.approx(40e9 / 500e6)
    parameters = 357_826_560 + 136_134_656
    assert record.limit("int8", "decode-32") == pytest.approx(800e9 / (2 * parameters))


def test_ratio_compares_values_of_the_same_round(report: Any, tmp_path: Path) -> None:
    rows = {
        "decode-1": {"penstock": [60.0, 30.0], "llama.cpp": [40.0, 20.0]},
        "rss": {"penstock": [5e8], "llama.cpp": [6e8]},
    }
    record = report.Record(write_record(tmp_path / "suite.json", rows))
    assert record.ratio("int8", "decode-1", "penstock", "llama.cpp") == [1.5, 1.5]
    assert record.ratio("int8", "rss", "penstock", "llama.cpp") == pytest.approx([1.2])
    assert record.best("int8", "rss", is_own=False) == "llama.cpp"


def test_report_has_goals_and_all_rows(report: Any, tmp_path: Path) -> None:
    rows = {"decode-1": {"penstock": [79.0], "llama.cpp": [40.0]}, "rss": {"penstock": [6e8]}}
    record = report.Record(write_record(tmp_path / "suite.json", rows))
    report.write_table(record, tmp_path / "suite.md")
    lines = (tmp_path / "suite.md").read_text().splitlines()
    assert "| int8/decode-1 | 88% | 80 | 79 | 99% | llama.cpp: 40 | 1.98 | 1.98 | yes |" in lines
    assert "| int8/rss | <= 560 | - | 600 | - | - | - | - | no |" in lines
    assert "| decode-1 | 80 | 79, 99% | 40, 50% |" in lines


def test_turn_measures_every_row_of_a_small_model(tmp_path: Path) -> None:
    config = make_config("llama", vocab_size=3000, max_position_embeddings=1024)
    model = write_checkpoint(tmp_path / "model", config)
    rows = ["ready", "prefill", "decode-2", "rss", "cached", "streams-2"]
    command = [sys.executable, str(SUITE / "peers.py"), "penstock", str(model), "float32", "2", *rows]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["row"] for line in lines if "row" in line] == rows
    assert all(line["value"] > 0 for line in lines if "row" in line)
    assert lines[-1]["about"]["weight_bytes"] > 0


def test_load_generator_counts_all_events_of_the_stub() -> None:
    script = str(SUITE.parent / "load_generator.py")
    command = [sys.executable, script, "--streams", "3", "--tokens", "7", "--rounds", "1"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    titles = [line.partition(":")[0] for line in result.stdout.splitlines()]
    kinds = [(how, pause) for how in ("scan", "decode") for pause in ("steps", "no pause")]
    assert titles == [f"{how}, {pause}, 3 streams" for how, pause in kinds]


def test_soak_of_the_server_passes(tiny_model: Path) -> None:
    options = ("--minutes", "0.03", "--interval", "0.5", "--clients", "8", "--slack", "500")
    command = [sys.executable, str(SUITE.parent / "server_soak.py"), *options, str(tiny_model)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["passed"]), result


def test_soak_of_adapters_passes(tiny_model: Path) -> None:
    options = ("--cycles", "100", "--gaps", "0", "--streams", "3")
    command = [sys.executable, str(SUITE.parent / "lora_soak.py"), *options, str(tiny_model)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["passed"]), result
