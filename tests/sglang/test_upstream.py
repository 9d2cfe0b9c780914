"""scripts/run_upstream_tests.py without a GPU: which of SGLang's tests it runs, on which backend, and what its status says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/run_upstream_tests.py"
spec = importlib.util.spec_from_file_location("run_upstream_tests", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

KIT = "from sglang.test.kits.attention_unittest.attention_methods.dsv4_attention import make_dsv4_cases\n"
INDEXER = "from sglang.srt.layers.attention.dsv4.v41_indexer.types import get_tail_row_indices\n"
FILES = {
    "test/registered/attention/test_kit.py": KIT,
    "test/registered/unit/test_indexer.py": INDEXER,
    "test/registered/unit/test_package.py": "from sglang.srt.layers.attention.dsv4 import v41_indexer\n",
    "test/registered/unit/test_other.py": "import torch\n",
    "test/registered/unit/test_near.py": "from sglang.srt.layers.attention.dsv4.indexer import C4Indexer\n",
    "test/registered/test_server.py": INDEXER + "popen_launch_server()\n",
    "python/test_elsewhere.py": INDEXER,
}


def checkout(folder, files=FILES):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def call(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        cwd="/",  # not the checkout
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_files_are_found_by_what_they_import(tmp_path):
    found = [path.name for path in script.upstream_files(checkout(tmp_path))]
    assert found == ["test_kit.py", "test_indexer.py", "test_package.py"]


@pytest.mark.parametrize("files", [{}, {"test/registered/unit/test_other.py": "import torch\n"}])
def test_a_checkout_without_them_is_an_error(tmp_path, files, capsys):
    with pytest.raises(SystemExit) as end:
        script.main(["--checkout", str(checkout(tmp_path, files))])
    assert end.value.code == 2 and "no test of the DSV4 kit or the V4.1 indexer" in capsys.readouterr().err


def test_the_clone_is_of_the_installed_tag(monkeypatch, capsys):
    calls = []

    def refuse(command, check):
        calls.append(command)
        raise subprocess.CalledProcessError(128, command)

    monkeypatch.setattr(script.subprocess, "run", refuse)
    with pytest.raises(SystemExit) as end:
        script.main(["--clone", "--list"])
    assert end.value.code == 2 and "give --checkout" in capsys.readouterr().err
    (command,) = calls
    assert command[:2] == ["git", "clone"] and "v" + script.importlib.metadata.version("sglang") in command


def test_our_backend_takes_the_place_of_stocks(tmp_path):
    """The kit builds ours, in our cases and in a checkout's; a failure there is the script's."""
    test = (
        KIT
        + """
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from tests.upstream import swap

def test_the_name_is_ours():
    assert ATTENTION_BACKENDS["dsv4"] is swap.ours

def test_wrong():
    assert False
"""
    )
    folder = checkout(tmp_path, {"test/test_one.py": test})
    options = ("--checkout", folder, "--", "-q", "-W", "ignore")
    done = call(*options, "-k", "metadata or name_is_ours")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.startswith(f"{folder}/test/test_one.py\n") and "16 passed" in done.stdout
    done = call(*options, "-k", "wrong")
    assert done.returncode == 1 and "test_wrong" in done.stdout


def test_nothing_that_ran_is_no_success():
    done = call("--", "-q", "-W", "ignore", "-k", "sliding_window")
    assert done.returncode == 5 and "needs a CUDA GPU of compute capability 9.0 or 10.x" in done.stdout


@pytest.mark.parametrize(
    "error, raised", [(AssertionError, RuntimeError), (ImportError, RuntimeError), (ValueError,) * 2]
)
def test_a_backend_that_cannot_be_built_is_no_skip(monkeypatch, error, raised):
    """The kit skips a case whose backend fails to build with an assertion or an import."""
    import types

    from tests.upstream import swap

    def fail(model_runner):
        raise error("why")

    monkeypatch.setattr(swap.backend, "create_backend", fail)
    with pytest.raises(raised, match="why"):
        swap.ours(types.SimpleNamespace(gpu_id=0))
