"""`dsv41-sparse bench plot`: the drawings are those of the result files, and the docs show them."""

import json
from pathlib import Path

import pytest

from sglang_dsv41 import cli
from sglang_dsv41.bench import plot, results

ROOT = Path(__file__).resolve().parents[2]
CURRENT = [ROOT / "benchmarks/results" / name for name in ("kernels.json", "server.json")]


def row(case, unit="us", stock=100.0, ours=10.0, **extra):
    return {"case": case, "unit": unit, "stock": stock, "ours": ours, "ratio": 2.5, **extra}


def content(*rows):
    versions = {"sglang": "0.5.23"}
    return {
        "gpu": "NVIDIA H20",
        "versions": versions,
        "commit": "0123456789",
        "date": "2026-12-01T1",
        "rows": list(rows),
    }


@pytest.fixture
def write(tmp_path):
    def write(name, *rows):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content(*rows)))
        return str(path)

    return write


def test_the_images_of_the_docs_are_those_of_the_result_files():
    """Regenerate with `dsv41-sparse bench plot benchmarks/results/{kernels,server}.json --out docs/images`."""
    expected = {
        f"{path.stem}-{suffix}.svg": data
        for path in CURRENT
        for suffix, data in plot.figures(results.read(path), path.name).items()
    }
    drawn = [path for path in (ROOT / "docs/images").glob("*.svg") if path.name != "step.svg"]
    assert {path.name: plot.data_of(path) for path in drawn} == expected
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    for name in expected:
        assert f"](images/{name})" in page


def test_lines_are_the_rows_of_both_sides():
    rows = [row(f"sparse_logits 8x{c}", stock=c / 1024, ours=8.0) for c in (1048576, 131072, 262144)]
    rows += [row("sparse_logits 32x131072", stock=500.0), row("sparse_logits 32x262144", stock=None)]
    rows += [row("verify_dense 8x6x131072"), row("full_pass 8x131072"), row("sparse_logits 8x524288", ours=None)]
    drawn = plot.figures(content(*rows), "k.json")
    assert set(drawn) == {"context", "rows"}
    assert "8 rows" in drawn["context"]["title"]
    stock, ours = drawn["context"]["lines"]
    assert (stock["panel"], stock["label"], stock["side"], ours["side"]) == ("consumer", "logits", "stock", "ours")
    assert stock["x"] == ours["x"] == [131072, 262144, 1048576]
    assert (stock["y"], ours["y"]) == ([128.0, 256.0, 1024.0], [8.0, 8.0, 8.0])
    stock, ours = drawn["rows"]["lines"]
    assert (stock["x"], stock["y"], ours["y"]) == ([8, 32], [128.0, 500.0], [8.0, 10.0])
    assert drawn["rows"]["caption"].startswith("k.json: NVIDIA H20, SGLang 0.5.23, commit 0123456, 2026-12-01")


def test_bars_are_the_rows_of_both_sides():
    samples = {"stock": [90.0, 100.0, 130.0], "ours": [250.0]}
    rows = [row("decode 8x131072", "tok/s", 100.0, 250.0, samples=samples), row("decode 8x2048", "tok/s")]
    rows += [
        row("prefill_chunk 131072", "tok/s"),
        row("prefill 8x131072", "tok/s"),
        row("decode 2x8", "tok/s", ours=None),
    ]
    (bars,) = [data["bars"] for data in plot.figures(content(*rows), "s.json").values()]
    cases = ["decode 8x2048", "decode 8x131072", "prefill 8x131072", "prefill_chunk 131072"]
    assert [bar["case"] for bar in bars] == cases
    assert [bar["panel"] for bar in bars] == ["decode", "decode", "prefill", "prefill"]
    assert bars[1]["ranges"] == {"stock": [90.0, 130.0], "ours": [250.0, 250.0]}
    assert (bars[1]["stock"], bars[1]["ours"], bars[1]["ratio"]) == (100.0, 250.0, 2.5)


def test_one_context_gives_no_line_over_contexts():
    assert set(plot.figures(content(row("dense_logits 8x131072")), "k.json")) == {"rows"}


@pytest.mark.parametrize("rows", [[], [row("fp8 64x4", "instructions")], [row("tp: decode 8x2048", "tok/s")]])
def test_a_file_without_drawable_cases_is_refused(write, tmp_path, capsys, rows):
    assert cli.main(["bench", "plot", write("other.json", *rows), "--out", str(tmp_path / "out")]) == 2
    assert "other.json has nothing to draw: it needs kernel cases" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_two_files_of_one_name_are_refused(write, tmp_path, capsys):
    files = [write(f"{folder}/server.json", row("decode 8x2048", "tok/s")) for folder in "ab"]
    assert cli.main(["bench", "plot", *files, "--out", str(tmp_path)]) == 2
    assert "two files give server-speed.svg" in capsys.readouterr().err


def test_without_matplotlib_it_says_how_to_get_it(write, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    file = write("server.json", row("decode 8x2048", "tok/s"))
    assert cli.main(["bench", "plot", file, "--out", str(tmp_path / "out")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


# ---- with matplotlib ----


def test_a_rerun_gives_the_same_bytes(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for folder in "ab":
        assert cli.main(["bench", "plot", *map(str, CURRENT), "--out", str(tmp_path / folder)]) == 0
    written = sorted((tmp_path / "a").iterdir())
    assert len(written) == 3 and capsys.readouterr().out.splitlines()[: len(written)] == [
        str(tmp_path / "a" / name) for name in ("kernels-context.svg", "kernels-rows.svg", "server-speed.svg")
    ]
    for path in written:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
        text = path.read_text(encoding="utf-8")
        assert (
            "<dc:date>" not in text
            and "matplotlib.org" not in text.partition("<metadata>")[2].partition("</metadata>")[0]
        )


@pytest.mark.parametrize("suffix", ["context", "rows"])
def test_what_is_drawn_of_kernels(suffix):
    pytest.importorskip("matplotlib")
    data = plot.figures(results.read(CURRENT[0]), "kernels.json")[suffix]
    figure = plot.build(data)
    assert [axis.get_title() for axis in figure.axes] == ["consumer", "source"]
    drawn = []
    for axis in figure.axes:
        assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
        assert axis.get_xlabel() == data["x"]
        drawn += [(list(line.get_xdata()), list(line.get_ydata()), line.get_color()) for line in axis.get_lines()]
    assert figure.axes[0].get_ylabel() == "time of one layer, us"
    assert drawn == [(line["x"], line["y"], plot.COLOURS[line["side"]]) for line in data["lines"]]
    assert figure.get_supxlabel() == data["caption"] and "kernels.json: NVIDIA H200" in data["caption"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "stock dsv4, logits", "dsv41-sparse, logits", "stock dsv4, whole pass", "dsv41-sparse, whole pass",
    ]  # fmt: skip


def test_what_is_drawn_of_a_server():
    pytest.importorskip("matplotlib")
    (data,) = plot.figures(results.read(CURRENT[1]), "server.json").values()
    figure = plot.build(data)
    assert figure.axes[0].get_ylabel() == "tokens/s"
    for axis in figure.axes:
        bars = [bar for bar in data["bars"] if bar["panel"] == axis.get_title()]
        heights = [patch.get_height() for patch in axis.patches]
        assert heights == [bar["stock"] for bar in bars] + [bar["ours"] for bar in bars]
        assert [text.get_text() for text in axis.texts] == [f"{bar['ratio']:.2f}x" for bar in bars]
        assert axis.get_ylim()[0] == 0
