"""scripts/multi_gpu.py without a GPU: its refusal, arguments, comparisons and result file, on engines that answer at once."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/multi_gpu.py"


def load():
    if "multi_gpu" not in sys.modules:
        spec = importlib.util.spec_from_file_location("multi_gpu", SCRIPT)
        sys.modules["multi_gpu"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["multi_gpu"])
    return sys.modules["multi_gpu"]


multi_gpu = load()
H200 = multi_gpu.Gpu("NVIDIA H200", "9.0")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi on PATH that answers with the given lines."""

    def answer(*lines):
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return answer


@pytest.fixture
def report(tmp_path):
    results = multi_gpu.ResultFile(tmp_path / "multi_gpu.json", "multi_gpu", argv=[str(SCRIPT)], commit="abc")
    made = multi_gpu.Report(results, say=lambda line: None)
    made.part = "tp"
    return made


def outcomes(report) -> dict:
    return {check["name"]: check["outcome"] for check in report.checks}


# ---- the machine ----


def test_one_gpu_is_refused_before_anything_slow(nvidia_smi, tmp_path):
    nvidia_smi("NVIDIA H200, 9.0")
    out = tmp_path / "out.json"
    # Without site-packages neither torch nor SGLang could be imported.
    run = subprocess.run(
        [sys.executable, "-S", SCRIPT, "--out", out], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert run.returncode == 2
    assert "found 1 GPU (nvidia-smi: NVIDIA H200 (compute capability 9.0)); needed: 2 of one host" in run.stderr
    assert not out.exists() and not run.stdout


def test_gpus_that_cuda_hides_do_not_count(nvidia_smi, monkeypatch):
    nvidia_smi("NVIDIA H200, 9.0", "NVIDIA H200, 9.0")
    assert multi_gpu.visible_gpus() == [H200, H200]
    assert multi_gpu.too_few(multi_gpu.visible_gpus()) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert multi_gpu.visible_gpus() == []
    assert "found 0 GPUs (nvidia-smi: none)" in multi_gpu.too_few([])


def test_no_driver_is_no_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert multi_gpu.visible_gpus() == []


# ---- arguments ----


def options_of(*argv):
    options = multi_gpu.parse_arguments(argv)
    options.model, options.vocab_size = Path("m"), 10240
    return options


def test_parts_run_in_their_order():
    assert options_of().only == ["kernels", "tp", "dp", "cp"]
    assert options_of("--only", "cp", "--only", "tp").only == ["tp", "cp"]


def test_the_models_follow_the_size_of_the_run():
    assert (options_of().preset, options_of("--quick").preset) == ("topology", "tiny")
    assert (options_of().rounds, options_of("--quick").rounds, options_of("--quick", "--rounds", "2").rounds) == (
        3,
        1,
        2,
    )


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--only", "ep"], "invalid choice: 'ep'"),
        (["--cases", "decode 8"], "decode BxC"),
        (["--cases", "decode 3x2048"], "'decode 3x2048' does not suit DP attention"),
        (["--cases", "prefill_chunk 131072"], "does not suit DP attention"),
    ],
)
def test_bad_arguments_end_the_parser(argv, message, capsys):
    with pytest.raises(SystemExit):
        multi_gpu.parse_arguments(argv)
    assert message in capsys.readouterr().err


def test_tensor_parallelism_alone_takes_any_case():
    assert options_of("--only", "tp", "--cases", "decode 3x2048", "prefill_chunk 131072").cases


def test_engines_of_a_part_differ_from_one_gpus_by_its_parallelism():
    options = options_of("--engine-arg", "disable_custom_all_reduce=true")
    one = multi_gpu.arguments_of(options)
    assert "tp_size" not in one and one["disable_custom_all_reduce"] is True
    for part in ("tp", "dp", "cp"):
        assert multi_gpu.arguments_of(options, part) == one | multi_gpu.PARTS[part]
    assert multi_gpu.arguments_of(options, "dp")["enable_dp_attention"] is True
    assert multi_gpu.arguments_of(options_of("--engine-arg", "tp_size=4"), "tp")["tp_size"] == 4
    small = multi_gpu.arguments_of(options_of("--cases", "decode 2x2048"))
    assert small["context_length"] >= max(multi_gpu.LENGTHS) + multi_gpu.NEW_TOKENS


# ---- the result file ----


def test_checks_and_rows_are_named_after_their_part(report):
    report.judge("tokens", True, "all")
    report.check("prefill", "failed", "the message")
    report.add("decode 8x2048", "tok/s", stock=[100.0], ours=[150.0])
    content = json.loads(report.results.path.read_text())
    assert content["checks"] == [
        {"name": "tp: tokens", "outcome": "passed", "detail": "all"},
        {"name": "tp: prefill", "outcome": "failed", "detail": "the message"},
    ]
    assert (content["rows"][0]["case"], content["rows"][0]["ratio"]) == ("tp: decode 8x2048", 1.5)
    assert set(content) == {"name", "command", "gpu", "versions", "switches", "commit", "date", "rows", "checks"}
    assert report.failed() == ["tp: prefill"]


def test_what_failed_or_did_not_run_is_a_failure(report):
    report.check("a", "failed", "")
    report.check("b", "not run", "")
    report.check("c", "passed", "")
    assert report.failed() == ["tp: a", "tp: b"]
    with pytest.raises(AssertionError):
        report.check("d", "refused", "")


@pytest.mark.parametrize("commit, kept", [("abc", ["dp: tokens"]), ("def", [])])
def test_other_parts_of_the_same_commit_are_kept(report, commit, kept):
    for report.part in ("tp", "dp"):
        report.check("tokens", "passed", "")
        report.add("decode 8x2048", "tok/s", stock=[1.0], ours=[1.0])
    again = multi_gpu.ResultFile(report.results.path, "multi_gpu", argv=[str(SCRIPT)], commit=commit)
    second = multi_gpu.Report(again, say=lambda line: None)
    second.keep(["kernels", "dp", "cp"])
    assert [check["name"] for check in second.checks] == kept
    assert [row["case"] for row in again.rows] == (["dp: decode 8x2048"] if kept else [])


# ---- comparisons ----

TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8]]
MOVED = [[1, 2, 3, 4], [5, 9, 9, 9]]


@pytest.mark.parametrize(
    "one_gpu, several, stocks, ones",
    [
        (TOKENS, (TOKENS, TOKENS), "passed", "passed"),
        # Two ranks round alike for both: ours may differ from one GPU as far as stock does.
        (TOKENS, (MOVED, MOVED), "passed", "passed"),
        (TOKENS, (TOKENS, MOVED), "failed", "failed"),
        (TOKENS, (MOVED, TOKENS), "failed", "passed"),
    ],
)
def test_tokens_are_judged_by_stocks(report, one_gpu, several, stocks, ones):
    multi_gpu.compare_tokens(
        report,
        {"stock": one_gpu, "ours": one_gpu},
        dict(zip(("stock", "ours"), several, strict=True)),
        where=", the other rank idle",
    )
    names = ("tp: tokens equal stock's, the other rank idle", "tp: tokens equal one GPU's, the other rank idle")
    assert outcomes(report) == dict(zip(names, (stocks, ones), strict=True))


def test_unequal_prompts_are_judged_by_stocks(report):
    multi_gpu.compare_unequal(report, {"stock": TOKENS, "ours": TOKENS}, {"stock": MOVED, "ours": MOVED})
    multi_gpu.compare_unequal(report, {"stock": TOKENS, "ours": TOKENS}, {"stock": TOKENS, "ours": MOVED})
    assert [check["outcome"] for check in report.checks] == ["passed", "failed"]


def probe_report(**changes) -> dict:
    mode = {"rows": 8, "short": 0, "missed": 0.0, "overlap": 1.0, "gap": 0.0, "blocks": 0.0}
    found = {name: dict(mode) for name in ("source", "decode", "verify", "extend")}
    found["digests"] = {"decode 20": 7, "decode 24": 9, "verify 24": 0, "extend 24": 3}
    for name, change in changes.items():
        found[name] |= change
    return found


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({}, None),
        ({"decode": {"overlap": 0.5}}, "decode: overlap 0.5"),
        ({"extend": {"gap": 0.1}}, "extend: overlap 1, gap 0.1"),
        ({"source": {"short": 1}}, "short 1"),
        ({"source": {"missed": 0.1}}, "missed 0.1"),
        ({"source": {"blocks": 0.1}}, "blocks 0.1"),
        ({"decode": {"rows": 0}}, "decode: no row was compared"),
        ({"verify": {"rows": 0, "overlap": 0.0}}, None),
    ],
)
def test_selections_of_a_rank(report, changes, fault):
    multi_gpu.compare_ranks(report, [probe_report(), probe_report(**changes)], shared=())
    first, second = report.checks
    assert first["outcome"] == "passed" and first["name"] == "tp: selections of rank 0 equal SGLang's"
    assert second["outcome"] == ("failed" if fault else "passed")
    assert (fault or "8 decode") in second["detail"]


def test_ranks_that_select_differently(report):
    def judged(part, *found):
        multi_gpu.compare_ranks(report, found, shared=multi_gpu.SHARED_WORK[part])
        return report.checks[-1]["name"], report.checks[-1]["outcome"], report.checks[-1]["detail"]

    same = "tp: ranks select the same"
    dealt = probe_report(digests={"extend 24": 8})
    for part, other, outcome, detail in (
        ("tp", probe_report(digests={"decode 24": 8}), "failed", "differ: decode 24"),
        ("tp", probe_report(), "passed", "3 layers and modes with selections, all steps equal"),
        ("tp", dealt, "failed", "differ: extend 24"),
        # The rows of an extend are dealt to context-parallel ranks; decode is every rank's.
        ("cp", dealt, "passed", "2 layers and modes with selections, all steps equal"),
        ("cp", probe_report(digests={"decode 20": 8}), "failed", "differ: decode 20"),
    ):
        assert judged(part, probe_report(), other) == (same, outcome, detail)
    assert judged("dp", probe_report(), probe_report(digests={"decode 24": 8}))[0] == (
        "tp: selections of rank 1 equal SGLang's"
    )
    idle = probe_report(digests=dict.fromkeys(("decode 20", "decode 24"), 0))
    assert judged("cp", idle, idle)[1] == "failed", "nothing selected is nothing shown"


def test_a_rank_without_a_report(report):
    multi_gpu.compare_ranks(report, [probe_report(), None], shared=("decode",))
    assert [(c["outcome"], c["detail"]) for c in report.checks] == [("failed", "rank 1 wrote no report")]


def test_captured_graphs_are_read_from_a_log():
    line = "Capture target decode CUDA graph end. bs=[1, 2, 4, 8]"
    assert multi_gpu.captured_graphs(f"[TP0] {line}\n[TP1] {line}") == line
    assert multi_gpu.captured_graphs("Disable cuda graph") is None


# ---- kernels ----


@pytest.fixture
def outputs():
    pytest.importorskip("torch")
    from tests.candidates import SMALL

    def outputs(**options):
        return multi_gpu.kernel_outputs("reference", "cpu", lens=(0, 1, 9, 300, 700), geometry=SMALL, **options)

    return outputs


def test_the_same_kernels_give_the_same_outputs(outputs):
    base = outputs()
    assert multi_gpu.differing(base, outputs(blocks=base["chosen"])) == []
    assert base["picks"].isfinite().sum(1).tolist() == [0, 1, 9, 24, 24]
    assert base["valid columns"].tolist()[:3] == [0, 1, 9]


@pytest.mark.parametrize(
    "operation, wrong",
    [
        ("sparse_logits", {"consumer logits"}),
        ("choose_blocks", {"blocks"}),
        ("select_visible", {"source picks"}),
        ("select_candidates", {"picks", "picked slots"}),
    ],
)
def test_a_kernel_that_gives_something_else_is_named(outputs, monkeypatch, operation, wrong):
    from sglang_dsv41.kernels.reference import ReferenceKernels

    base, original = outputs(), getattr(ReferenceKernels, operation)

    def spoilt(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if operation == "sparse_logits":
            result[3, 0] += 1
        elif operation == "choose_blocks":
            result[4, :] = -1
        elif operation == "select_visible":
            args[3][args[2]][3, :2] = -1
        else:
            for out in kwargs.values():
                out[args[2]][3, :2] = -1
        return result

    monkeypatch.setattr(ReferenceKernels, operation, spoilt)
    assert wrong <= set(multi_gpu.differing(base, outputs(blocks=base["chosen"])))


# ---- a run ----


class Engine:
    """Answers at once: tokens by the prompt's stream, a constant speed."""

    def __init__(self, log: Path, token: int = 0, error: str = ""):
        self.log, self.token, self.error = log, token, error
        self.cached, self.stopped = set(), False

    def wait_ready(self):
        if self.error:
            self.log.write_text(self.error)
            raise multi_gpu.EngineError("the engine: died")

    def flush(self):
        self.cached.clear()

    def generate(self, prompts, count):
        hits = [p.length if p in self.cached else 0 for p in prompts]
        self.cached |= set(prompts)
        ids = [[p.stream + self.token + i for i in range(count)] for p in prompts]
        return {"seconds": 0.1 + 0.01 * count, "cached": hits, "output_ids": ids}

    def stop(self, *, gently):
        self.stopped = True


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script on two GPUs that are not there."""

    def run(*argv, wrong_tokens=0, error="", probe=probe_report):
        started = []

        @contextlib.contextmanager
        def engine_pair(options, part):
            started.append(part)
            log = options.log_dir / f"{part}.log"
            log.write_text("Capture target decode CUDA graph end. bs=[1, 2]\n")
            token = wrong_tokens if part else 0
            yield {"stock": Engine(log), "ours": Engine(log, token=token)}

        def start_engine(name, arguments, options, environment):
            started.append(name)
            if "DSV41_PROBE_OUT" in environment:
                for rank in range(2):
                    Path(environment["DSV41_PROBE_OUT"].replace("{rank}", str(rank))).write_text(json.dumps(probe()))
            return Engine(options.log_dir / f"{name}.log", error=error)

        monkeypatch.setattr(multi_gpu, "visible_gpus", lambda: [H200, H200])
        monkeypatch.setattr(multi_gpu, "engine_pair", engine_pair)
        monkeypatch.setattr(multi_gpu, "start_engine", start_engine)
        monkeypatch.setattr(multi_gpu, "run_kernels", lambda options, report: report.check("hopper", "passed", "equal"))
        monkeypatch.setattr(multi_gpu.signal, "signal", lambda *_: None)
        monkeypatch.setattr(multi_gpu.sys, "path", list(sys.path))
        for name in ("PYTHONPATH", "DSV41_WEIGHTS_SHAPES"):
            monkeypatch.setenv(name, "")
        out = tmp_path / "multi_gpu.json"
        status = multi_gpu.main(["--quick", "--out", str(out), "--log-dir", str(tmp_path / "logs"), *argv])
        return status, json.loads(out.read_text()), started

    return run


def test_a_whole_run(run):
    status, content, started = run()
    assert started == [None, "tp", "tp-probed", "dp", "dp-probed", "cp", "cp-probed"], "one GPU is served once"
    assert [(c["name"], c["outcome"]) for c in content["checks"]] == [
        ("kernels: hopper", "passed"),
        ("tp: tokens equal stock's", "passed"),
        ("tp: tokens equal one GPU's", "passed"),
        ("tp: prompts of unequal length at once", "passed"),
        ("tp: decode graphs were captured", "passed"),
        ("tp: selections of rank 0 equal SGLang's", "passed"),
        ("tp: selections of rank 1 equal SGLang's", "passed"),
        ("tp: ranks select the same", "passed"),
        ("dp: tokens equal stock's, the other rank idle", "passed"),
        ("dp: tokens equal one GPU's, the other rank idle", "passed"),
        ("dp: prompts of unequal length at once", "passed"),
        ("dp: decode graphs were captured", "passed"),
        ("dp: selections of rank 0 equal SGLang's", "passed"),
        ("dp: selections of rank 1 equal SGLang's", "passed"),
        ("cp: tokens equal stock's", "passed"),
        ("cp: tokens equal one GPU's", "passed"),
        ("cp: prompts of unequal length at once", "passed"),
        ("cp: decode graphs were captured", "passed"),
        ("cp: selections of rank 0 equal SGLang's", "passed"),
        ("cp: selections of rank 1 equal SGLang's", "passed"),
        ("cp: ranks select the same", "passed"),
    ]
    assert [row["case"] for row in content["rows"]] == [
        f"{part}: {case}" for part in ("tp", "dp", "cp") for case in multi_gpu.QUICK_CASES
    ]
    assert (content["name"], content["gpus"], content["model"]) == ("multi_gpu", 2, "tiny")
    assert content["command"].startswith("python scripts/multi_gpu.py --quick")
    assert status == 0


def test_wrong_tokens_fail_the_run(run, capsys):
    status, content, _ = run("--only", "tp", wrong_tokens=1)
    failed = [c["name"] for c in content["checks"] if c["outcome"] == "failed"]
    assert status == 1 and failed == ["tp: tokens equal stock's", "tp: tokens equal one GPU's"]
    assert "failed or not run: tp: tokens equal stock's" in capsys.readouterr().err
    assert len(content["rows"]) == len(multi_gpu.QUICK_CASES), "a failed check does not end the part"


def test_an_engine_that_dies_fails_its_part_alone(run):
    status, content, started = run("--only", "cp", "--only", "kernels", error="CUDA out of memory")
    assert status == 1 and started == [None, "cp", "cp-probed"]
    assert [(c["name"], c["outcome"]) for c in content["checks"] if c["outcome"] != "passed"] == [
        ("cp: servers", "failed")
    ]
    assert content["checks"][0] == {"name": "kernels: hopper", "outcome": "passed", "detail": "equal"}


def test_a_case_past_the_deadline_is_not_run(run):
    status, content, _ = run("--only", "tp", "--deadline", "1e-9")
    assert status == 1 and content["rows"] == []
    missing = [c["name"] for c in content["checks"] if c["outcome"] == "not run"]
    assert missing == [f"tp: {case}" for case in multi_gpu.QUICK_CASES]


# ---- the weights that one GPU and two ranks share ----


def plugin(name):
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/gpu/probe/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def weights():
    return plugin("dsv41_weights")


def model_of(**tensors):
    return types.SimpleNamespace(state_dict=lambda: tensors)


def test_ranks_hold_parts_of_one_gpus_weights(weights, tmp_path):
    import torch

    path = str(tmp_path / "shapes.json")
    whole = {
        "norm.weight": torch.empty(6),
        "wq_b.weight": torch.empty(8, 6),
        "wo_b.weight": torch.empty(6, 8),
        "mlp.gate_up_proj.weight": torch.empty(8, 6),
        "experts.w13_weight": torch.empty(3, 8, 6),
        "scale": torch.zeros(4, dtype=torch.int32),
    }
    cut = {"wq_b.weight": 0, "wo_b.weight": 1, "mlp.gate_up_proj.weight": 0, "experts.w13_weight": 1}
    weights.fill(model_of(**whole), 0, 1, -1e-3, 1e-3, path)
    assert len({t.double().abs().sum().item() for t in whole.values()}) == len(whole), "a tensor's numbers are its own"
    for rank in (0, 1):
        shards = {name: t.chunk(2, cut[name])[0].clone() if name in cut else t.clone() for name, t in whole.items()}
        weights.fill(model_of(**shards), rank, 2, -1e-3, 1e-3, path)
        for name, t in whole.items():
            pieces = t.chunk(2, cut.get(name, 0)) if name.endswith(weights.MERGED) else (t,)
            expected = torch.cat([piece.chunk(2, cut[name])[rank] for piece in pieces], cut[name]) if name in cut else t
            assert torch.equal(shards[name], expected), name


def test_a_cut_that_is_not_understood_is_named(weights, tmp_path):
    import torch

    path = str(tmp_path / "shapes.json")
    with pytest.raises(FileNotFoundError):
        weights.fill(model_of(a=torch.empty(4)), 0, 2, 0, 1, path)
    weights.fill(model_of(a=torch.empty(4, 4)), 0, 1, 0, 1, path)
    for shard, message in (
        ({"a": torch.empty(3, 4)}, r"a: \[4, 4\] is not \[3, 4\]"),
        ({"b": torch.empty(2)}, "no such"),
    ):
        with pytest.raises(ValueError, match=message):
            weights.fill(model_of(**shard), 0, 2, 0, 1, path)


def test_the_test_plugins_are_found_where_the_script_puts_them():
    from importlib.metadata import distributions

    points = {p.name: p.value for d in distributions(path=[str(multi_gpu.PROBE)]) for p in d.entry_points}
    assert points == {name: f"{name}:install" for name in ("dsv41_broken", "dsv41_probe", "dsv41_weights")}


# ---- the probe's digests ----


def test_a_digest_is_that_of_the_picks_and_steps_whatever_their_order():
    probe_module = plugin("dsv41_probe")
    import torch

    def digest(*steps, lens=(3, 3, 0)):
        probe = probe_module.Probe("unused")
        probe.digests[24, "decode"] = torch.zeros((), dtype=torch.int64)
        published = types.SimpleNamespace(rows=types.SimpleNamespace(lens=torch.tensor(lens, dtype=torch.int32)))
        for step in steps:
            probe.digest(24, "decode", published, torch.tensor(step, dtype=torch.int32))
        return int(probe.digests[24, "decode"])

    step, other = [[5, 7, -1], [2**30, 1, 2], [0, 0, 0]], [[5, 8, -1], [2**30, 1, 2], [0, 0, 0]]
    known = digest(step, other)
    assert known == digest([[7, -1, 5], [1, 2, 2**30], [9, 9, 9]], [[8, 5, -1], [2, 2**30, 1], [4, 5, 6]])
    # Another pick, another order of steps, of rows, or a step more.
    for steps in ([step, step], [other, step], [step[1::-1] + step[2:], other], [step, other, other], [step]):
        assert digest(*steps) != known
    # Rows past the schedule's are padding.
    assert digest([*step, [1, 1, 1]], other) == known
