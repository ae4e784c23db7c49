"""What the check writes, and its status."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftline.bench.gpu import __main__ as check
from draftline.bench.gpu.device import Gpu
from draftline.bench.gpu.findings import Finding, append_finding, read_findings
from draftline.bench.gpu.report import JSON_FILE, PAGE_FILE, CheckReport, load_check, write_check
from draftline.bench.gpu.running import PartReport
from draftline.bench.machine import describe_machine
from draftline.errors import ArtifactError, DraftlineError
from draftline.sessions.tensorrt.cuda_driver import CudaDriver
from tests.bench.gpu.fake_gpu import FakeLibrary

RIGHT = Finding("float16, float16 pool", 0.001, "largest difference", 0.004, "200 cases")
WRONG = Finding("a | b", math.nan, "largest difference", 0.004)
MEASURED = Finding("copy", 251.5, "GB/s")


def make_report(*findings: Finding, **changes: Any) -> CheckReport:
    part = PartReport("kernels", "Kernels against the oracle", "ended", 12.0, 90.0, findings)
    card = {"name": "A card", "architecture": 89, "memory_gib": 22.5, "driver": "580.1", "cuda": "13.0"}
    report = CheckReport(card, describe_machine(), "2026-11-30 09:00 UTC", "scripts/gpu_check", 33.0, (part,))
    return replace(report, parts=(replace(part, **changes),))


def test_findings_are_kept_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    assert read_findings(path) == []
    for finding in (RIGHT, MEASURED, WRONG):
        append_finding(path, finding)
    with path.open("a") as file:
        file.write('{"what": "cut')
    *same, nan = read_findings(path)
    assert same == [RIGHT, MEASURED]
    assert math.isnan(nan.value)
    assert [finding.agrees for finding in (*same, nan)] == [True, None, False]


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = make_report(RIGHT, MEASURED)
    write_check(report, tmp_path)
    loaded = load_check(tmp_path / JSON_FILE)
    assert replace(loaded, machine={}) == replace(report, machine={})
    assert sorted(path.name for path in tmp_path.iterdir()) == [JSON_FILE, PAGE_FILE]
    page = (tmp_path / PAGE_FILE).read_text(encoding="utf-8")
    assert "- A card, compute capability 8.9, 22 GiB; driver 580.1, CUDA 13.0" in page
    assert "Everything agrees." in page
    assert "| float16, float16 pool | 0.001 largest difference | 0.004 | yes | 200 cases |" in page
    assert "| copy | 251.5 GB/s | | | |" in page
    with pytest.raises(ArtifactError, match=r"is the gpu-check\.json of a check"):
        load_check(tmp_path / PAGE_FILE)


@pytest.mark.parametrize("report", [make_report(RIGHT, WRONG), make_report(RIGHT, outcome="failed", error="CUDA: no")])
def test_what_does_not_agree_is_said(report: CheckReport, tmp_path: Path) -> None:
    write_check(report, tmp_path)
    assert not load_check(tmp_path / JSON_FILE).agrees
    page = (tmp_path / PAGE_FILE).read_text(encoding="utf-8")
    assert "NOT everything agrees." in page
    assert "| nan largest difference | 0.004 | **NO** |" in page or "FAILED: CUDA: no; after 12 of 90 s." in page


def test_nothing_that_ran_is_no_agreement() -> None:
    assert not replace(make_report(), parts=()).agrees


def test_without_a_gpu_nothing_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--output", str(tmp_path / "new")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu_check: this machine has an NVIDIA GPU and its driver; got no device")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--parts", "all"]])
def test_wrong_arguments_are_refused_before_a_gpu_is_looked_for(arguments: list[str], tmp_path: Path) -> None:
    assert check.main([*arguments, "--output", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("finding", "status"), [(RIGHT, 0), (WRONG, 1)])
def test_the_status_says_whether_all_agrees(
    finding: Finding, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(parts: Any, output: Path, seconds: float, say: Any) -> tuple[PartReport, ...]:
        assert seconds == 60 * 8 - check.CLOSING_SECONDS
        return make_report(finding).parts

    monkeypatch.setattr(check, "open_gpu", lambda: Gpu(CudaDriver(FakeLibrary())))
    monkeypatch.setattr(check, "run_parts", run)
    assert check.main(["--output", str(tmp_path)]) == status
    report = load_check(tmp_path / JSON_FILE)
    assert (report.card["name"], report.card["architecture"], report.card["cuda"]) == ("A fake L4", 89, "13.0")
    assert report.command == f"scripts/gpu_check --output {tmp_path}"
    assert report.agrees == (status == 0)


def test_a_gpu_that_cannot_be_opened_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> Gpu:
        raise DraftlineError("CUDA", "cuCtxSetCurrent succeeds", "CUDA_ERROR_DEVICES_UNAVAILABLE", "see nvidia-smi")

    monkeypatch.setattr(check, "open_gpu", fail)
    assert check.main(["--output", str(tmp_path / "new")]) == 2
