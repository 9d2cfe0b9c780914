"""`dsv41-sparse run`: a program that loads no plugins gets them, in its spawned workers too."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from sglang_dsv41 import cli

pytest.importorskip("sglang")

NAME = "dsv41-sparse"
DATA = pathlib.Path(__file__).parents[1] / "data"

# As SGLang's one-batch benchmark does it: no load_plugins, arguments resolved in the parent, a worker spawned with a
# function of the main module.
PROGRAM = """
import argparse
import json
import multiprocessing
import sys
from dataclasses import dataclass

from . import helper


@dataclass
class Extra:
    number: int


def look(args):
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return [list(attention_backends_of(resolved_view(args))), "dsv41-sparse" in ATTENTION_BACKENDS, helper.HERE]


def work(args, extra, queue):
    queue.put([extra.number, __name__, *look(args)])


if __name__ == "__main__":
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = ServerArgs.from_cli_args(parser.parse_args())
    args.resolve_once()
    multiprocessing.set_start_method("spawn", force=True)
    queue = multiprocessing.Queue()
    child = multiprocessing.Process(target=work, args=(args, Extra(7), queue))
    child.start()
    seen = queue.get(timeout=120)
    child.join()
    print(json.dumps({"argv0": sys.argv[0], "file": __file__, "parent": look(args), "child": seen}))
    sys.exit(3)
"""


def dsv41_sparse(*argv, path=()):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-m", "sglang_dsv41.cli", *map(str, argv)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__init__.py").touch()
    (tmp_path / "program" / "helper.py").write_text("HERE = 'beside the program'\n")
    (tmp_path / "program" / "bench.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((DATA / "tiny_v41.json").read_bytes())
    return tmp_path


def test_program_and_its_spawned_worker_have_the_plugin(program):
    done = dsv41_sparse(
        "run", "program.bench", "--model-path", program / "model", "--device", "cuda", "--skip-tokenizer-init",
        "--attention-backend", NAME, path=[program],
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    file = str(program / "program" / "bench.py")
    assert seen["argv0"] == seen["file"] == file
    assert seen["parent"] == [[NAME, NAME], True, "beside the program"]
    assert seen["child"] == [7, "__mp_main__", [NAME, NAME], True, "beside the program"]
    assert "RuntimeWarning" not in done.stderr


@pytest.mark.parametrize("module", ["sglang.bench_one_batch", "sglang.benchmark.offline_throughput"])
def test_offline_benchmark_accepts_the_backend(module, program):
    # A folder without a config stops the benchmark right after it parsed its arguments.
    done = dsv41_sparse("run", module, "--model-path", program / "program", "--attention-backend", NAME)
    assert "invalid choice" not in done.stderr
    assert "program" in done.stderr and "config" in done.stderr
    assert done.returncode != 0
    if module == "sglang.bench_one_batch":
        assert "is sglang.benchmark.one_batch in this SGLang" in done.stderr


def test_offline_benchmark_alone_refuses_it():
    # Why `run` exists; fails when SGLang's benchmarks load plugins themselves.
    done = subprocess.run(
        [sys.executable, "-m", "sglang.benchmark.one_batch", "--model-path", "x", "--attention-backend", NAME],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "invalid choice" in done.stderr


@pytest.mark.parametrize(
    "argv, text",
    [
        (["run", "no_such_module"], "cannot run no_such_module: No module named 'no_such_module'"),
        (["run", "sglang.no_such.module"], "cannot run sglang.no_such.module: No module named 'sglang.no_such'"),
        (["run", "--attention-backend", NAME], "MODULE comes first"),
        (["unknown"], "unknown command 'unknown'; one of run, doctor, try, bench, model"),
    ],
)
def test_errors_are_one_line(capsys, argv, text):
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_run_without_sglang(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["run", "sglang.benchmark.one_batch"]) == 2
    assert "SGLang is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize("argv, status", [(["--help"], 0), ([], 2), (["run", "--help"], 0), (["run"], 2)])
def test_help(capsys, argv, status):
    assert cli.main(argv) == status
    assert "dsv41-sparse run" in capsys.readouterr().out if "run" in argv else "commands:" in capsys.readouterr().out


def test_commands_are_imported_when_called(monkeypatch):
    script = "import sys; from sglang_dsv41 import cli; cli.main(['--help']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "sglang", *cli.COMMANDS.values()} & set(loaded)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: type("M", (), {"main": staticmethod(lambda a: a)}))
    assert cli.main(["doctor", "--model", "x"]) == ["--model", "x"]
