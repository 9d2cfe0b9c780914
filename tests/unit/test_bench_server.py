"""`dsv41-sparse bench server` and its result file, on engines with a known speed."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_dsv41.bench import results
from sglang_dsv41.bench import server as bench_server

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
Case, Bench, Prompt = bench_server.Case, bench_server.Bench, bench_server.Prompt


class FakeEngine:
    """An engine with exact prefix caching, whose time is an overhead, so much a prefill token, so much a step."""

    def __init__(self, name="", calls=None, *, overhead=0.5, prefill=1e-4, step=4e-3, token=7):
        self.name, self.overhead, self.prefill, self.step, self.token = name, overhead, prefill, step, token
        self.calls = [] if calls is None else calls
        self.cached = set()
        self.flushes = 0
        self.remembers = True

    def flush(self):
        self.flushes += 1
        self.cached.clear()

    def _hit(self, prompt):
        return max((n for stream, n in self.cached if stream == prompt.stream and n <= prompt.length), default=0)

    def generate(self, prompts, max_new_tokens):
        self.calls.append((self.name, tuple(prompts), max_new_tokens))
        hits = [self._hit(prompt) for prompt in prompts]
        new = sum(p.length + p.tail_length - hit for p, hit in zip(prompts, hits))
        if self.remembers:
            self.cached |= {(p.stream, p.length) for p in prompts}
        return {
            "seconds": self.overhead + new * self.prefill + max_new_tokens * self.step,
            "cached": hits,
            "output_ids": [[self.token] * max_new_tokens for _ in prompts],
        }


def make(rounds=3, chunk=1024, capacity=1 << 20, **ours):
    calls, lines = [], []
    engines = FakeEngine("stock", calls), FakeEngine("ours", calls, **ours)
    return Bench(*engines, chunk=chunk, capacity=capacity, rounds=rounds, say=lines.append), engines, calls


@pytest.mark.parametrize("text", ["decode 8x2048", "prefill 8x131072", "ttft 9", "prefill_chunk 524288"])
def test_case_names_round_trip(text):
    assert Case.parse(text).name == text


@pytest.mark.parametrize("text", ["decode 8", "prefill_chunk 2x8", "decode 0x8", "train 1x1", ""])
def test_other_case_names_are_refused(text):
    with pytest.raises(ValueError, match="none of"):
        Case.parse(text)


def test_decode_excludes_prefill_and_overhead():
    bench, _, _ = make(step=2e-3, overhead=9.0, prefill=5e-3)
    row = bench.run(Case.parse("decode 8x2048"))
    assert row["stock"] == pytest.approx([8 / 4e-3] * 3)
    assert row["ours"] == pytest.approx([8 / 2e-3] * 3)
    assert (row["unit"], row["same_tokens"]) == ("tok/s", 1.0)


def test_engines_take_turns_and_get_the_same_prompts():
    bench, _, calls = make(rounds=2)
    for text in ("decode 2x4096", "prefill 2x4096", "prefill_chunk 8192"):
        calls.clear()
        bench.run(Case.parse(text))
        by_engine = {name: [call[1:] for call in calls if call[0] == name] for name in ("stock", "ours")}
        assert by_engine["stock"] == by_engine["ours"]
        per_round = {"prefill": 1}.get(text.split()[0], 2)
        order = [name for name, _, _ in calls[-4 * per_round :]]
        assert order == ["stock"] * per_round + ["ours"] * 2 * per_round + ["stock"] * per_round


def test_prefill_is_cold_every_time():
    bench, engines, _ = make(overhead=0.0, step=1e-9)
    bench.run(Case.parse("decode 2x4096"))
    row = bench.run(Case.parse("prefill 2x4096"))
    assert row["ours"] == pytest.approx([1e4] * 3)
    assert engines[1].flushes == 3


def test_first_token_is_seconds_from_an_empty_cache():
    bench, engines, _ = make(overhead=1.0, prefill=1e-3, step=0.5)
    bench.run(Case.parse("decode 1x4096"))
    row = bench.run(Case.parse("ttft 4096"))
    assert row["unit"] == "s" and row["ours"] == pytest.approx([1.0 + 4.096 + 0.5] * 3)
    assert results.make_row("ttft 4096", **row)["ratio"] == pytest.approx(0.165, abs=5e-3), "less time is better"
    assert engines[1].flushes == 3


def test_memory_is_counted_to_the_engine_that_works():
    """Each engine's growth, its peaks between two reads included, and not the other's."""
    used = [1 << 30]
    watch = bench_server.MemoryWatch(lambda: used[0], interval=1e-4)

    class Growing(FakeEngine):
        def generate(self, prompts, max_new_tokens):
            keep, peak = self.growth
            used[0] += peak
            time.sleep(0.02)
            used[0] += keep - peak
            return super().generate(prompts, max_new_tokens)

    engines = Growing("stock"), Growing("ours")
    engines[0].growth, engines[1].growth = (0, 64 << 20), (2 << 20, 3 << 20)
    bench = Bench(*engines, chunk=1024, capacity=1 << 20, rounds=2, say=lambda line: None, memory=watch)
    assert bench.run(Case.parse("ttft 2048"))["peak_mib"] == {"stock": 64.0, "ours": 7.0}
    engines[0].growth = engines[1].growth = (0, 0)
    assert bench.run(Case.parse("ttft 2048"))["peak_mib"] == {"stock": 64.0, "ours": 7.0}, "what was, stays"


def test_without_nvml_there_is_no_memory(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert bench_server.MemoryWatch.of_first_gpu() is None
    bench, _, _ = make()
    assert "peak_mib" not in bench.run(Case.parse("ttft 2048"))


def test_warm_prefill_is_an_error():
    bench, engines, _ = make()
    engines[1].flush = lambda: None
    with pytest.raises(bench_server.CaseError, match="found in the cache after a flush"):
        bench.run(Case.parse("prefill 2x4096"))


def test_chunk_speed_is_the_second_chunk_alone():
    bench, _, calls = make(overhead=3.0, prefill=2e-4)
    row = bench.run(Case.parse("prefill_chunk 8192"))
    assert row["stock"] == pytest.approx([1e4] * 3)
    assert row["ours"] == pytest.approx([5e3] * 3)
    tails = [prompt.tail for name, prompts, _ in calls for prompt in prompts if name == "ours" and prompt.tail_length]
    assert len(tails) == len(set(tails)), "a tail that was sent before would be found in the cache"
    measured = [prompt for _, prompts, _ in calls[-2:] for prompt in prompts]
    assert [(p.length, p.tail_length) for p in measured] == [(7168, 1024), (7168, 2048)]


def test_chunk_needs_the_context_in_the_cache():
    bench, engines, _ = make()
    engines[1].remembers = False
    with pytest.raises(bench_server.CaseError, match="ours found 0 of 7168 tokens"):
        bench.run(Case.parse("prefill_chunk 8192"))


def test_cache_is_flushed_only_for_room():
    bench, engines, _ = make(capacity=30000)
    bench.run(Case.parse("decode 2x4096"))
    bench.run(Case.parse("decode 2x4096"))
    assert engines[0].flushes == 0
    bench.run(Case.parse("decode 4x4096"))
    assert engines[0].flushes == 1
    with pytest.raises(bench_server.CaseError, match="more than --max-total-tokens 30000"):
        bench.run(Case.parse("decode 8x4096"))


def test_decode_needs_its_prompts_in_the_cache():
    bench, engines, _ = make()
    engines[0].remembers = False
    with pytest.raises(bench_server.CaseError, match="stock found"):
        bench.run(Case.parse("decode 2x4096"))


def test_a_case_that_fails_does_not_end_the_run(tmp_path):
    bench, _, _ = make(capacity=30000)
    file = results.ResultFile(tmp_path / "server.json", "server", argv=["x.py"])
    cases = [Case.parse(text) for text in ("decode 8x8192", "decode 2x2048")]
    missing = bench_server.measure(bench, cases, file, time_left=lambda: True)
    assert len(missing) == 1 and "decode 8x8192" in missing[0]
    assert [row["case"] for row in file.rows] == ["decode 2x2048"]


def test_noise_is_not_a_speed():
    bench, _, _ = make(step=0.0)
    with pytest.raises(bench_server.CaseError, match="noise"):
        bench.run(Case.parse("decode 2x1024"))


def test_tokens_count_up_to_the_first_difference():
    assert bench_server._same_tokens([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert bench_server._same_tokens([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == 1.0
    bench, _, _ = make(token=8)
    assert bench.run(Case.parse("decode 2x1024"))["same_tokens"] == 0.0


def test_every_finished_case_is_in_the_file(tmp_path):
    bench, _, _ = make(step=2e-3)
    cases = [Case.parse(text) for text in ("decode 8x2048", "decode 4x2048", "decode 2x2048")]
    out = tmp_path / "sub" / "server.json"
    file = results.ResultFile(out, "server", argv=[str(SCRIPTS / "bench_server.py"), "--quick"], commit="abc")
    finished = []

    def time_left():
        finished.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return len(finished) < 3

    missing = bench_server.measure(bench, cases, file, time_left=time_left)
    assert missing == ["decode 2x2048: the deadline had passed"]
    assert finished == [0, 1, 2]
    content = json.loads(out.read_text())
    assert set(content) == {"name", "command", "gpu", "versions", "switches", "commit", "date", "rows"}
    assert set(content["versions"]) == {"sglang", "torch", "triton", "driver"}
    assert content["command"] == "python scripts/bench_server.py --quick"
    row = content["rows"][0]
    assert (row["case"], row["unit"], row["ratio"]) == ("decode 8x2048", "tok/s", 2.0)
    assert [len(row["samples"][name]) for name in ("stock", "ours")] == [3, 3]
    assert list(tmp_path.glob("sub/*")) == [out]


def test_ratio_above_one_is_better_for_ours():
    assert results.make_row("k", "us", stock=[300, 310, 320], ours=[31, 30, 32], bytes=31_000_000)["ratio"] == 10.0
    assert results.make_row("k", "us", stock=[310], ours=[31], bytes=31_000_000)["gb_per_s"] == 1000.0
    assert results.make_row("d", "tok/s", stock=[100], ours=[160])["ratio"] == 1.6
    alone = results.make_row("d", "us", stock=[], ours=[5])
    assert (alone["stock"], alone["ratio"]) == (None, None)


def test_table_has_a_line_for_each_case(tmp_path):
    file = results.ResultFile(tmp_path / "r.json", "kernels", argv=["x.py"])
    file.add("sparse_logits 8x131072", "us", stock=[310.0], ours=[31.0])
    file.add("alone", "us", stock=[], ours=[31.0])
    assert file.table().splitlines()[2:] == [
        "| sparse_logits 8x131072 | us | 310 | 31 | 10 |",
        "| alone | us | - | 31 | - |",
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}', '{"rows": [{"case": "x"}]}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(results.ResultError, match="r.json is no"):
        results.read(tmp_path / "r.json")
    with pytest.raises(results.ResultError, match="cannot be read"):
        results.read(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "argv, command",
    [
        (
            ["dsv41-sparse", "bench", "server", "--cases", "decode 8x2048"],
            "dsv41-sparse bench server --cases 'decode 8x2048'",
        ),
        (["/opt/venv/bin/dsv41-sparse", "bench", "server"], "dsv41-sparse bench server"),
        ([str(SCRIPTS / "bench_server.py"), "--quick"], "python scripts/bench_server.py --quick"),
        (["/elsewhere/measure.py"], "python measure.py"),
    ],
)
def test_command_is_one_that_anyone_can_run(argv, command):
    assert results.command_line(argv) == command


def test_commit_is_that_of_the_package_only(tmp_path):
    """An environment inside another repository: that one's commit says nothing of the package."""
    package = tmp_path / "sglang_dsv41/__init__.py"
    package.parent.mkdir()
    package.write_text("")
    (tmp_path / "other.txt").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]

    def commit(*paths):
        for command in (["init", "-q"], ["add", *paths], ["commit", "-q", "-m", "x"]):
            subprocess.run([*git, *command], check=True)

    commit("other.txt")
    assert results.commit_of(tmp_path) == "unknown"
    commit("sglang_dsv41")
    assert len(results.commit_of(tmp_path)) == 40
    package.write_text("changed")
    assert results.commit_of(tmp_path).endswith("-dirty")


@pytest.fixture
def engines(monkeypatch):
    """Stands in for the GPU and the two engine processes; what the engines would have been started with."""
    started = {}

    @contextlib.contextmanager
    def engine_pair(options, arguments, say):
        started.update(arguments)
        say("up")
        yield FakeEngine("stock"), FakeEngine("ours", step=2e-3)

    monkeypatch.setattr(bench_server, "engine_pair", engine_pair)
    monkeypatch.setattr(bench_server.machine, "require_gpu", lambda needed: None)
    monkeypatch.setattr(bench_server.machine, "require_sglang", lambda: None)
    monkeypatch.setattr(bench_server.signal, "signal", lambda *_: None)
    return started


def test_a_whole_run(engines, tmp_path, capsys):
    pytest.importorskip("tqdm")
    out = tmp_path / "server.json"
    argv = ["--cases", "decode 8x2048", "decode 9999x2048", "decode 2x2048", "--rounds", "2", "--out", str(out)]
    assert bench_server.main(argv) == 1  # a case that does not fit
    content = json.loads(out.read_text())
    assert content["command"].startswith("dsv41-sparse bench server --cases 'decode 8x2048'")
    assert [(row["case"], row["ratio"]) for row in content["rows"]] == [("decode 8x2048", 2.0), ("decode 2x2048", 2.0)]
    printed = capsys.readouterr()
    table = printed.out[printed.out.index("| case |") :].splitlines()
    assert table[0] == "| case | unit | stock | ours | ratio |" and len(table) == 4
    assert "not measured: case decode 9999x2048 needs" in printed.err
    assert Path(engines["model_path"]).name == "tiny"


def test_the_script_is_the_same_command(engines, tmp_path):
    pytest.importorskip("tqdm")
    out = tmp_path / "sub/server.json"
    argv = ["--quick", "--cases", "decode 2x2048", "--model", "m"]
    assert bench_server.main(argv, program=[str(SCRIPTS / "bench_server.py")], out=out) == 0
    assert json.loads(out.read_text())["command"].startswith("python scripts/bench_server.py --quick")
    assert engines["model_path"] == "m"


def test_streams_are_the_same_everywhere_and_distinct():
    left, right = bench_server.Streams(10240), bench_server.Streams(10240)
    long = left.prompt(Prompt(3, 2000))
    assert right.prompt(Prompt(3, 500)) == long[:500]
    assert right.prompt(Prompt(3, 2000)) == long
    with_tail = right.prompt(Prompt(3, 500, 1, 100))
    assert len(with_tail) == 600 and with_tail[:500] == long[:500]
    assert right.prompt(Prompt(4, 500)) != long[:500]
    assert all(bench_server.FIRST_TOKEN_ID <= token < 10240 for token in long)
    assert len(right.prompt(Prompt(3, 2000))) == 2000, "a tail must not grow the stream"


class TestArguments:
    def test_defaults_hold_every_case(self):
        options = bench_server.parse_arguments(["--model", "m"])
        arguments = bench_server.engine_arguments(options, options.cases)
        assert arguments["context_length"] >= 524288 + 8192 + 1
        assert arguments["context_length"] >= 524288 + bench_server.MANY
        assert arguments["cuda_graph_max_bs_decode"] == 8
        for case in options.cases:
            assert case.cache_tokens(options.chunked_prefill_size, options.rounds) < options.max_total_tokens
        assert 2 * arguments["mem_fraction_static"] < 1

    def test_engine_arguments_override(self):
        options = bench_server.parse_arguments(
            ["--model", "m", "--engine-arg", "cuda_graph_backend_decode=disabled", "--engine-arg", "device=cpu"]
        )
        arguments = bench_server.engine_arguments(options, options.cases)
        assert arguments["cuda_graph_backend_decode"] == "disabled"
        assert arguments["device"] == "cpu"

    def test_bad_case_ends_the_parser(self, capsys):
        with pytest.raises(SystemExit):
            bench_server.parse_arguments(["--cases", "decode 8"])
        assert "decode BxC" in capsys.readouterr().err
