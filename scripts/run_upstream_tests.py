#!/usr/bin/env python3
"""Run SGLang's own tests with our backend in place of its DeepSeek-V4 one.

    python scripts/run_upstream_tests.py                     the attention unittest kit (DSV4) of the installed wheel
    python scripts/run_upstream_tests.py --checkout DIR      and, of a checkout of SGLang, its tests of the kit and of the V4.1 indexer
    python scripts/run_upstream_tests.py --clone             the same, of a fresh clone of the installed version's tag (network)
    python scripts/run_upstream_tests.py -- -k decode -x     what follows `--` goes to pytest

The wheel has the kit, not the tests that use it; so ours in tests/upstream/attention_kit.py run its cases, and a checkout's
run besides. They need a CUDA GPU of compute capability 9.0 or 10.x, which FlashMLA has kernels for; without one only what
SGLang registers for the CPU, and the metadata of some cases, is run. Status 0: something ran and passed; 1: a
test failed; 2: bad arguments; 5: nothing ran.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/sgl-project/sglang"
KIT = re.compile(r"attention_unittest\.attention_methods\.dsv4_attention\b")
INDEXER = re.compile(r"\bdsv4(?:\.| import )(?:v41_indexer|dsv41_sparse)\b")
# Tests of whole servers want a released checkpoint and its GPUs.
SERVER = re.compile(r"\bpopen_launch_server\b")


def upstream_files(checkout: Path) -> list[Path]:
    """Test files of a checkout that use the DSV4 kit or the V4.1 indexer, found by what they import; they have moved
    between releases."""
    found = []
    for path in sorted((checkout / "test").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if (KIT.search(text) or INDEXER.search(text)) and not SERVER.search(text):
            found.append(path)
    return found


def clone(tag: str, folder: Path) -> Path:
    """``test/`` of SGLang's repository at ``tag``.

    Raises:
        subprocess.CalledProcessError: no network, or no such tag.
    """
    options = ["--quiet", "--depth", "1", "--branch", tag, "--filter", "blob:none", "--sparse"]
    subprocess.run(["git", "clone", *options, REPOSITORY, str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "sparse-checkout", "set", "test"], check=True)
    return folder


class Swap:
    """Pytest plugin: our backend under the name ``dsv4``, and a count of outcomes."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_sessionstart(self) -> None:
        from tests.upstream import swap

        swap.install()

    def pytest_runtest_logreport(self, report) -> None:
        self.passed += report.when == "call" and report.passed


def run(files: Sequence[Path], options: Sequence[str] = ()) -> int:
    """Pytest's status over our cases of the kit and ``files``; 5 where nothing ran."""
    import pytest

    swap = Swap()
    command = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    # Upstream's files share base names.
    command += ["--import-mode", "importlib", str(ROOT / "tests/upstream/attention_kit.py"), *map(str, files), *options]
    status = int(pytest.main(command, plugins=[swap]))
    return status if status or swap.passed else 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkout", type=Path, help="a checkout of SGLang at the installed version's tag")
    source.add_argument("--clone", action="store_true", help="clone that tag into a temporary folder")
    parser.add_argument("--list", action="store_true", help="name the checkout's files and run nothing")
    parser.add_argument("pytest", nargs="*", metavar="-- PYTEST ARG", help="options for pytest")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        checkout = options.checkout
        if options.clone:
            tag = f"v{importlib.metadata.version('sglang')}"
            try:
                checkout = clone(tag, Path(folder) / "sglang")
            except subprocess.CalledProcessError as error:
                parser.error(f"cannot clone {REPOSITORY} at {tag} (status {error.returncode}); give --checkout")
        files = []
        if checkout is not None:
            files = upstream_files(checkout.resolve())
            if not files:
                parser.error(f"{checkout} has no test of the DSV4 kit or the V4.1 indexer under test/")
            print(*files, sep="\n", flush=True)
        return 0 if options.list else run(files, options.pytest)


if __name__ == "__main__":
    sys.exit(main())
