"""The README's table of measured gain comes from the result files, and from nothing else."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "scripts/readme_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_results(folder, name, rows):
    content = {
        "name": name,
        "command": f"python scripts/bench_{name}.py",
        "gpu": "NVIDIA H200",
        "versions": {"sglang": "0.5.23", "torch": "2.14.1", "triton": "3.8.0", "driver": "1"},
        "commit": "0123456789abcdef",
        "date": "2026-12-01T10:00:00Z",
        "rows": rows,
    }
    (folder / f"{name}.json").write_text(json.dumps(content))


def row(case, unit, stock, ours, ratio):
    return {"case": case, "unit": unit, "stock": stock, "ours": ours, "ratio": ratio, "samples": {}}


def test_the_readme_is_up_to_date(table):
    assert table.main(["--check"]) == 0


def test_rows_of_both_files(table, tmp_path):
    write_results(tmp_path, "kernels", [row("sparse_logits 8x131072", "us", 310.2, 19.14, 16.2)])
    write_results(tmp_path, "server", [row("decode 8x2048", "tok/s", 2000.4, None, None)])
    lines = table.render(tmp_path).splitlines()
    assert "| consumer's logits, 8 x 131,072 | 310 us | 19.1 us | 16.20x |" in lines
    assert "| decode, 8 x 2,048 | 2,000 tok/s | - | - |" in lines
    assert any("NVIDIA H200" in line and "commit 0123456" in line and "bench_server.py" in line for line in lines)
    assert not any("Not measured" in line for line in lines)


def test_absent_files_are_said(table, tmp_path):
    text = table.render(tmp_path)
    assert "|" not in text
    assert text.count("Not measured yet") == 2 and "server.json" in text and "kernels.json" in text


def test_rewrites_only_what_is_between_the_markers(table, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# top\n{table.BEGIN}\nold\n{table.END}\nbottom\n")
    arguments = ["--readme", str(readme), "--results", str(tmp_path)]
    assert table.main([*arguments, "--check"]) == 1
    assert "old" in readme.read_text()
    assert table.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("# top\n") and text.endswith("\nbottom\n") and "old" not in text
    assert table.main([*arguments, "--check"]) == 0


def test_a_readme_without_markers_is_refused(table):
    with pytest.raises(ValueError, match="table:gain"):
        table.replace("# top", "x")
