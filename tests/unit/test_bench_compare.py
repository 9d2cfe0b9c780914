"""`dsv41-sparse bench compare`: what fell, what is missing, and the exit status."""

import json
from pathlib import Path

import pytest

from sglang_dsv41 import cli

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Compares ratios by case; returns status, stdout and stderr."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)

    def run(new, old, *options, gpus=("H200", "H200")):
        for name, ratios, gpu in (("new", new, gpus[0]), ("old", old, gpus[1])):
            rows = [{"case": c, "unit": "us", "stock": 1.0, "ours": 1.0, "ratio": r} for c, r in ratios.items()]
            (tmp_path / f"{name}.json").write_text(json.dumps({"name": "kernels", "gpu": gpu, "rows": rows}))
        files = [str(tmp_path / "new.json"), "--baseline", str(tmp_path / "old.json")]
        status = cli.main(["bench", "compare", *files, *options])
        return status, *capsys.readouterr()

    return run


OLD = {"a 1x1": 2.0, "b 1x1": 10.0, "c 1x1": 1.0}


def test_a_file_equals_itself(compare, capsys):
    path = str(RESULTS / "kernels.json")
    assert cli.main(["bench", "compare", path, "--baseline", path, "--warn", "0", "--fail-on-regression"]) == 0
    assert "No case fell by more than 0%." in capsys.readouterr().out


def test_only_what_fell_past_the_limit_is_listed(compare):
    status, out, _ = compare({"a 1x1": 1.72, "b 1x1": 8.4, "c 1x1": 3.0}, OLD)
    assert status == 0
    assert "| b 1x1 | 10.00x | 8.40x | -16.0% |" in out and "| c 1x1 | 1.00x | 3.00x | +200.0% |" in out
    listed = out[out.index("Fell by more than 15%") :].splitlines()[1:]
    assert listed == ["  b 1x1: 10.00x to 8.40x (-16.0%)"]


def test_the_limit_and_the_status_can_be_chosen(compare):
    new = {"a 1x1": 1.72, "b 1x1": 9.9, "c 1x1": 1.0}
    assert compare(new, OLD, "--fail-on-regression")[0] == 0
    assert compare(new, OLD, "--warn", "0.1")[0] == 0
    status, out, _ = compare(new, OLD, "--warn", "0.1", "--fail-on-regression")
    assert status == 1 and "  a 1x1: 2.00x to 1.72x (-14.0%)" in out


def test_warnings_of_a_github_run(compare, monkeypatch):
    _, out, _ = compare({"a 1x1": 1.0}, OLD)
    assert "::warning" not in out
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    _, out, _ = compare({"a 1x1": 1.0, "b 1x1": 10.0}, OLD)
    assert [line for line in out.splitlines() if line.startswith("::")] == [
        "::warning title=benchmark::a 1x1 fell from 2.00x to 1.00x of stock (-50.0%25)"
    ]


def test_cases_of_one_side_are_named(compare):
    status, out, _ = compare({"a 1x1": 2.0, "b 1x1": None, "d 1x1": 1.0}, OLD, "--fail-on-regression")
    assert status == 0
    left = out[out.index("Not compared:") :].splitlines()[1:4]
    assert left == [
        "  d 1x1: not in the baseline",
        "  c 1x1: only in the baseline",
        "  b 1x1: no ratio in the new file",
    ]


def test_another_gpu_is_said(compare):
    assert "Baseline on H20, new on H200" in compare(OLD, OLD, gpus=("H200", "H20"))[1]
    assert "Baseline on" not in compare(OLD, OLD)[1]


def test_files_with_nothing_in_common(compare, capsys):
    status, out, err = compare({"d 1x1": 1.0}, OLD)
    assert status == 2 and out == "" and "first case: d 1x1" in err and "have no case with a ratio in common" in err
    assert compare({}, OLD)[0] == 2
    assert cli.main(["bench", "compare", "absent.json", "--baseline", "absent.json"]) == 2
    assert "absent.json cannot be read" in capsys.readouterr().err


def test_a_limit_that_is_no_share_is_refused(compare, capsys):
    with pytest.raises(SystemExit):
        compare(OLD, OLD, "--warn", "15")
    assert "--warn is a share" in capsys.readouterr().err
