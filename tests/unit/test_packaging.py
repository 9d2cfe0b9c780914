"""The wheel holds every module of the package, its type marker and its entry points, and asks for no other package."""

import configparser
import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
setuptools = pytest.importorskip("setuptools", minversion="77")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources, so that nothing is written into the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "sglang_dsv41", source / "sglang_dsv41", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


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
