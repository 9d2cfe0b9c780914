"""scripts/run.sh: where what it runs runs, in an environment that is already set up."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path):
    """Calls the script from ``tmp_path``; its environment's programs print their folder and arguments."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "dsv41-sparse"):
        (programs / name).write_text('#!/bin/sh\necho "$(basename "$0") in $(pwd): $*"\n')
        (programs / name).chmod(0o755)
    check = subprocess.run(
        ["cksum"], stdin=(ROOT / "pyproject.toml").open("rb"), capture_output=True, text=True, check=True
    )
    (tmp_path / "venv" / ".installed").write_text(f"{check.stdout.strip()} {ROOT} {tmp_path / 'venv'}\n")

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [str(ROOT / "scripts/run.sh"), *arguments],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "VENV": "venv"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return call


def test_a_command_runs_in_the_callers_folder(run, tmp_path):
    """So that a relative path means what the caller sees."""
    line = run("dsv41-sparse", "doctor", "--model-path", "./model")
    assert line == f"dsv41-sparse in {tmp_path}: doctor --model-path ./model"
    assert run("try", "--quick") == f"dsv41-sparse in {tmp_path}: try --quick"


def test_the_tests_run_in_the_checkout(run):
    line = run("test", "-q")
    assert line.startswith(f"python in {ROOT}: -m pytest") and line.endswith(
        "tests/unit tests/kernels tests/gpu tests/sglang -q"
    )
