"""`scripts/check_upstream.py` against the installed SGLang's files, and against copies in which something moved."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_dsv41 import seams

pytest.importorskip("sglang")

ROOT = Path(__file__).resolve().parents[2]
SGLANG = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
REGISTRY = "srt/layers/attention/attention_registry.py"


def needed_files():
    """The files of SGLang that the table names and the patches touch."""
    for module in {seam.module for seam in seams.SEAMS + seams.BENCH_SEAMS}:
        path = Path(*module.split(".")[1:])
        yield path.with_suffix(".py") if (SGLANG / path.with_suffix(".py")).is_file() else path / "__init__.py"
    for patch in (ROOT / "patches").glob("*.patch"):
        yield from map(Path, re.findall(r"^\+\+\+ b/python/sglang/(\S+)$", patch.read_text(), re.MULTILINE))


@pytest.fixture
def package(tmp_path):
    """A copy of those files, as a package of that name."""
    for path in set(needed_files()):
        (tmp_path / "sglang" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SGLANG / path, tmp_path / "sglang" / path)
    return tmp_path / "sglang"


def move_a_name(package):
    path = package / REGISTRY
    before = path.read_text(encoding="utf-8")
    after = re.sub(r"\bregister_attention_backend\b", "register_backend", before)
    assert after != before
    path.write_text(after, encoding="utf-8")


def check(*options, **environment):
    return subprocess.run(
        [sys.executable, ROOT / "scripts/check_upstream.py", *map(str, options)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_installed_release_has_not_moved(package):
    done = check("--package", package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Interfaces that moved: 0 of {len(seams.SEAMS + seams.BENCH_SEAMS)}." in done.stdout
    assert "Patches that do not apply: 0." in done.stdout


def test_a_moved_name_is_named(package):
    move_a_name(package)
    done = check("--package", package)
    assert done.returncode == 1, done.stderr
    assert "Interfaces that moved: 1 of" in done.stdout and "Patches that do not apply: 0." in done.stdout
    seam = "sglang.srt.layers.attention.attention_registry.register_attention_backend"
    assert f"- `{seam}`: expected parameters (name), found no such name" in done.stdout


def test_a_patch_that_does_not_apply_is_named(package):
    patch = ROOT / "patches/0002-cp-kind-by-convention.patch"
    (file,) = re.findall(r"^\+\+\+ b/python/sglang/(\S+)$", patch.read_text(), re.MULTILINE)
    (removed, *_) = re.findall(r"^-(?!--)\s*(\S.*)$", patch.read_text(), re.MULTILINE)
    text = (package / file).read_text(encoding="utf-8")
    assert removed in text
    (package / file).write_text(text.replace(removed, f"{removed}  # moved"), encoding="utf-8")
    done = check("--package", package)
    assert done.returncode == 1, done.stderr
    assert "Interfaces that moved: 0 of" in done.stdout and "Patches that do not apply: 1." in done.stdout
    assert f"- `{patch.name}`: error: patch failed: {file}" in done.stdout


def test_a_release_is_fetched_and_read(package, tmp_path):
    """By the real installer, from a folder that serves as the index; ours is the newest release there."""
    move_a_name(package)
    index = tmp_path / "index"
    index.mkdir()
    info = "sglang-99.1.dist-info"
    with zipfile.ZipFile(index / "sglang-99.1-py3-none-any.whl", "w") as wheel:
        for path in sorted(package.rglob("*.py")):
            wheel.write(path, path.relative_to(tmp_path))
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: sglang\nVersion: 99.1\nRequires-Dist: torch==9.9.9\nRequires-Dist: numpy\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    offline = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(index), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    done = check(**offline)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"SGLang 99.1; this checkout names {seams.SUPPORTED}.")
    assert "Interfaces that moved: 1 of" in done.stdout and "It requires `torch==9.9.9`." in done.stdout

    absent = check("98.0", **offline)
    assert absent.returncode == 2 and absent.stdout == ""
    assert "cannot get sglang==98.0" in absent.stderr


def test_a_folder_that_is_no_package_is_refused(tmp_path):
    done = check("--package", tmp_path)
    assert done.returncode == 2 and "name a checkout's python/sglang" in done.stderr
