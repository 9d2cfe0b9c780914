"""`dsv41-sparse bench` before it measures: the machine, the commands, and that it loads nothing it does not need."""

import ctypes
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from sglang_dsv41 import bench, cli, seams
from sglang_dsv41.bench import compare, kernels, machine, plot, server

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {"kernels": kernels, "server": server, "plot": plot, "compare": compare}


def python(*argv, **kwargs):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, cwd=ROOT, **kwargs)


# ---- the machine ----


@pytest.mark.parametrize(
    "program", [("-m", "sglang_dsv41.cli", "bench"), ("scripts/bench_",)], ids=["command", "script"]
)
@pytest.mark.parametrize("command, needed", [("kernels", "compute capability 9.0"), ("server", "one CUDA GPU")])
def test_without_a_gpu_it_says_so_at_once(program, command, needed):
    program = [*program, command] if len(program) > 1 else [f"{program[0]}{command}.py"]
    done = python("-X", "importtime", *program, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and done.stdout == ""
    assert len(said) == 1 and f"bench{'_' if program[0] != '-m' else ' '}{command}" in said[0]
    assert "found: " in said[0] and needed in said[0].split("needed: ")[1]
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "argparse" in imported and not {"torch", "sglang", "tqdm", "numpy", "matplotlib"} & imported


class Driver:
    """libcuda without a GPU, or with one of capability 8.9."""

    def __init__(self, gpu):
        self.cuInit = lambda flags: 0 if gpu else 100

    def cuGetErrorString(self, status, text):
        text._obj.value = b"no CUDA-capable device is detected"

    def cuDeviceGet(self, device, index):
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA L40S"
        return 0

    def cuDeviceGetAttribute(self, number, attribute, device):
        number._obj.value = {75: 8, 76: 9}[attribute]
        return 0


def test_a_driver_without_a_gpu_gives_the_drivers_reason(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(gpu=False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(machine.MachineError, match="no CUDA-capable device.*CUDA_VISIBLE_DEVICES='7'.*needed: a GPU"):
        machine.require_gpu("a GPU")


def test_another_gpu_is_named(monkeypatch, capsys):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(gpu=True))
    assert machine.require_gpu("any").capability == (8, 9)
    assert kernels.main([]) == 2
    assert "found: NVIDIA L40S (compute capability 8.9); needed: a CUDA GPU" in capsys.readouterr().err


def test_sglang_that_lacks_a_kernel_is_named(monkeypatch):
    seam = seams.Seam("sglang.nowhere", "gone", "attribute", (), "time it")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(machine.MachineError, match="found: no SGLang; needed: pip install"):
        machine.require_sglang()
    monkeypatch.undo()
    pytest.importorskip("sglang")
    machine.require_sglang()
    with pytest.raises(machine.MachineError, match="sglang.nowhere.gone: .*no such module"):
        machine.require_sglang((seam,))


def test_an_engine_on_another_device_needs_no_gpu(monkeypatch, capsys):
    def refuse(what):
        def raises(*_):
            raise machine.MachineError(what)

        return raises

    monkeypatch.setattr(machine, "require_gpu", refuse("no GPU"))
    monkeypatch.setattr(machine, "require_sglang", refuse("no SGLang"))
    for argv, said in (([], "no GPU"), (["--engine-arg", "device=cpu"], "no SGLang")):
        assert server.main(argv) == 2
        assert said in capsys.readouterr().err


# ---- the commands ----


def test_help_loads_no_gpu_library():
    script = f"""
import contextlib, sys
from sglang_dsv41 import cli
for argv in (["--help"], ["bench"], *(["bench", command, "--help"] for command in {list(PARSERS)})):
    with contextlib.suppress(SystemExit):
        cli.main(argv)
print(*sys.modules, file=sys.stderr)
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "sglang", "triton", "tqdm", "numpy", "matplotlib"} & set(done.stderr.split())
    for command in PARSERS:
        assert f"usage: dsv41-sparse bench {command}" in done.stdout


def test_usage_and_unknown_commands(capsys):
    assert set(bench.COMMANDS) == set(PARSERS)
    assert cli.main(["bench"]) == 2
    usage = capsys.readouterr().out
    assert all(f"\n  {command} " in usage for command in bench.COMMANDS)
    assert cli.main(["bench", "everything"]) == 2
    assert "unknown command 'everything'; one of kernels, server, plot, compare" in capsys.readouterr().err


def documented():
    """Each `dsv41-sparse bench ...` and `python scripts/bench_...` of the docs and the workflow."""
    for page in ("docs/benchmarks.md", ".github/workflows/ci.yml", "README.md"):
        text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            found = re.match(
                r"(?:\s|run:|scripts/run\.sh|-)*(?:dsv41-sparse bench |python scripts/bench_)(kernels|server|plot|compare)(?:\.py)? (.*)",
                line,
            )
            if found:
                yield page, found[1], found[2]


def test_documented_commands_parse():
    seen = set()
    for page, command, rest in documented():
        PARSERS[command].parse_arguments(shlex.split(rest, comments=True))
        seen.add((page, command))
    assert {command for _, command in seen} == set(PARSERS)
    assert (".github/workflows/ci.yml", "compare") in seen and ("docs/benchmarks.md", "plot") in seen


@pytest.mark.parametrize("text", [*kernels.all_cases(), "sparse_logits 4x16384", "verify_dense 2x6x65536"])
def test_kernel_case_names_round_trip(text):
    assert str(kernels.CaseName.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["sparse_logits", "sparse_logits 8", "train 8x131072", "sparse_logits 0x131072", "a b c"]
)
def test_other_kernel_case_names_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        kernels.parse_arguments(["--cases", text])
    assert "is not KIND ROWSxCONTEXT" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["sparse_logits 8x8192", "sparse_logits 8x131073"])
def test_contexts_that_no_case_can_have(text):
    with pytest.raises(ValueError, match="multiple of 64, from 16384 on"):
        kernels.CaseName.parse(text)


# ---- the run ----


@pytest.fixture
def run_kernels(monkeypatch, tmp_path):
    """Runs `bench kernels` with every case's GPU work replaced by ``run_case``."""
    pytest.importorskip("tqdm")
    kernel_cases = pytest.importorskip("sglang_dsv41.bench.kernel_cases")
    monkeypatch.setattr(machine, "require_gpu", lambda *_: None)
    monkeypatch.setattr(machine, "require_sglang", lambda *_: None)
    monkeypatch.setattr(kernel_cases, "unmet", lambda kernels: None)

    def run(run_case, *argv, **kwargs):
        monkeypatch.setattr(kernel_cases, "run_case", run_case)
        return kernels.main(["--out", str(tmp_path / "kernels.json"), *argv], **kwargs)

    return run, kernel_cases, tmp_path / "kernels.json"


def test_each_finished_case_is_in_the_file(run_kernels, capsys):
    run, kernel_cases, out = run_kernels
    sizes = []

    def run_case(name, rounds, results, kernels, progress):
        progress.at(str(name))
        sizes.append(len(plot.results.read(out)["rows"]) if out.exists() else 0)
        if len(sizes) == 3:
            raise kernel_cases.WrongResult("our logits differ")
        results.add(str(name), "us", stock=[10.0] * rounds, ours=[5.0] * rounds)

    assert run(run_case, "--rounds", "2", "--no-progress") == 1
    assert sizes == [0, 1, 2]
    content = plot.results.read(out)
    assert content["command"] == f"dsv41-sparse bench kernels --out {out} --rounds 2 --no-progress"
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 4 and "| sparse_logits 1x131072 | us | 10 | 5 | 2 |" in printed.out
    assert printed.err == "dsv41-sparse bench kernels: our logits differ\n"


def test_a_kernel_set_that_cannot_be_had(run_kernels, monkeypatch, capsys):
    run, kernel_cases, out = run_kernels
    monkeypatch.setattr(kernel_cases, "unmet", lambda kernels: f"no compiler for {kernels}")
    assert run(None) == 2 and not out.exists()
    assert "no compiler for hopper; --kernels portable measures the Triton set" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_case_on_the_gpu(tmp_path, capsys):
    if machine.first_gpu().capability != (9, 0):
        pytest.skip("SGLang's side is Hopper's")
    out = tmp_path / "kernels.json"
    assert cli.main(["bench", "kernels", "--cases", "consumer_pass 2x32768", "--rounds", "2", "--out", str(out)]) == 0
    (row,) = plot.results.read(out)["rows"]
    assert len(row["samples"]["stock"]) == len(row["samples"]["ours"]) == 2 and row["ratio"] > 0
    assert "| consumer_pass 2x32768 | us |" in capsys.readouterr().out


PROGRESS = """
from sglang_dsv41.bench.progress import Progress
with Progress(2, show={show}) as progress:
    progress.at("decode 8x2048")
    progress.say("a line")
    progress.done()
"""


@pytest.mark.parametrize("terminal, show", [(True, True), (True, False), (False, True)])
def test_the_bar_is_for_terminals_and_can_be_switched_off(terminal, show):
    pytest.importorskip("tqdm")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    try:
        stderr = theirs if terminal else subprocess.PIPE
        command = [sys.executable, "-c", PROGRESS.format(show=show)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT, text=True, check=True)
        os.write(theirs, b"\n.")  # so that there is something to read
        bar = os.read(ours, 65536).decode() if terminal else done.stderr
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout == "a line\n"
    assert ("decode 8x2048" in bar and "1/2" in bar) == (terminal and show)
    assert terminal or bar == ""
