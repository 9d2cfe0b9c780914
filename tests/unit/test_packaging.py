"""Wheel and source archive hold every file, ask for no other package, and work where nothing else is installed."""

import configparser
import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
setuptools = pytest.importorskip("setuptools", minversion="77")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with wheel and source archive, built of a copy of the sources: nothing is written into the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "sglang_dsv41", source / "sglang_dsv41", ignore=shutil.ignore_patterns("__pycache__"))
    # setuptools puts arguments of its own into sys.argv.
    build = (
        "import sys; from setuptools import build_meta as b; out = sys.argv[1]; b.build_wheel(out); b.build_sdist(out)"
    )
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """bin folder of a new environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    (path,) = built.glob("*.whl")
    uv = shutil.which("uv")
    if uv is not None:
        steps = [
            [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "--quiet", "--offline", "--python", str(folder / "bin/python"), str(path)],
        ]
    else:
        if importlib.util.find_spec("ensurepip") is None:
            pytest.skip("needs uv, or a Python with ensurepip")
        steps = [
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-index", str(path)],
        ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    return folder / "bin"


def run(bin_folder, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        [bin_folder / "dsv41-sparse", *words],
        cwd=bin_folder,  # not the checkout
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def metadata(wheel, name):
    (path,) = [entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_every_file_is_there(wheel):
    files = {p.relative_to(ROOT).as_posix() for p in (ROOT / "sglang_dsv41").rglob("*") if p.is_file()}
    expected = {f for f in files if "__pycache__" not in f}
    assert expected == {entry for entry in wheel.namelist() if ".dist-info/" not in entry}
    assert "sglang_dsv41/py.typed" in expected


def test_the_cuda_sources_are_whole(wheel):
    """What ``hopper_ffi.cuh`` includes of ours, to the last file; an installed package compiles them on its first start."""
    folder, missing, seen = "sglang_dsv41/kernels/hopper/", ["hopper_ffi.cuh"], set()
    while missing:
        name = missing.pop()
        seen.add(name)
        included = re.findall(r'^#include "(.+)"', wheel.read(folder + name).decode(), re.MULTILINE)
        missing += [other for other in included if other not in seen]
    assert seen >= {"hopper_ffi.cuh", "index_logits.cuh", "selection.cuh"}


def test_entry_points(wheel):
    points = configparser.ConfigParser()
    points.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(points["sglang.srt.plugins"]) == {"dsv41_sparse": "sglang_dsv41.plugin:register"}
    assert dict(points["console_scripts"]) == {"dsv41-sparse": "sglang_dsv41.cli:main"}


def test_it_moves_no_pin(wheel):
    """Installed beside SGLang, it brings nothing along; the extras name SGLang's tested range."""
    message = email.message_from_string(metadata(wheel, "METADATA"))
    needs = message.get_all("Requires-Dist", [])
    assert needs and all("extra ==" in need for need in needs), needs
    from sglang_dsv41 import __version__, seams

    assert message["Version"] == __version__
    (sglang,) = [need for need in needs if need.startswith("sglang")]
    for bound in seams.SUPPORTED.split(","):
        assert bound.strip() in sglang


def test_the_source_archive_is_whole(built, wheel):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"}
    assert names >= {entry for entry in wheel.namelist() if ".dist-info/" not in entry}


def test_the_changelog_has_this_version():
    from sglang_dsv41 import __version__

    assert f"\n## {__version__} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_first_commands_in_a_clean_environment(installed):
    """Without SGLang, torch or anything else: the command says what it is, and the doctor what is missing."""
    from sglang_dsv41 import __version__, seams

    done = run(installed, "--help")
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr
    assert run(installed, "--version").stdout == f"sglang-dsv41 {__version__} for SGLang {seams.SUPPORTED}\n"
    done = run(installed, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False
    (sglang,) = [check for check in report["checks"] if check["what"] == "SGLang"]
    assert (sglang["status"], sglang["found"]) == ("FAIL", "not installed") and sglang["change"].startswith(
        "pip install"
    )


@pytest.mark.parametrize(
    "words", [("run", "x"), ("try", "--cpu"), ("bench", "kernels"), ("bench", "server"), ("model", "--out", "model")]
)
def test_what_needs_more_says_so(installed, words):
    done = run(installed, *words)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr and re.search(r"SGLang|tokenizers|torch", done.stdout + done.stderr), done
