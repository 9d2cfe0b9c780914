"""The seam table against the installed SGLang, and that each kind of row notices a change."""

import ast
import pathlib
import subprocess
import sys

import pytest

import sglang_dsv41
from sglang_dsv41 import seams
from sglang_dsv41.seams import Seam

pytest.importorskip("sglang")

SOURCE = """
import os
from elsewhere import imported
TABLE: dict = {}
add = TABLE.update
try:
    import fast as engine
except ImportError:
    engine = None

class Backend:
    kind = "dsv4"
    size: int
    def __init__(self, runner, skip=False):
        self.runner = runner
        self.a, self.b = runner
        self.c: int = self.unset.value
    @classmethod
    def of(cls, value):
        return value == "dsv4"

def call(a, b, c=1, *, d, e=2, **rest): ...
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package of the name sglang whose module sglang.srt.thing is SOURCE; importing it fails."""
    folder = tmp_path / "sglang" / "srt"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "thing.py").write_text(SOURCE)
    spec = seams.importlib.machinery.PathFinder.find_spec("sglang", [str(tmp_path)])
    monkeypatch.setattr(seams.importlib.util, "find_spec", lambda name: spec)
    return lambda name, kind, *expected: seams.check([Seam("sglang.srt.thing", name, kind, expected, "test")])


def test_installed_sglang_fits():
    assert [str(mismatch) for mismatch in seams.check(seams.SEAMS + seams.BENCH_SEAMS)] == []


def test_check_imports_no_sglang():
    script = "import sys; from sglang_dsv41 import seams; seams.check(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"sglang", "torch", "triton"} & set(loaded)


@pytest.mark.parametrize(
    "name, kind, expected",
    [
        ("TABLE", "attribute", ()),
        ("add", "attribute", ()),
        ("imported", "attribute", ()),
        ("engine", "attribute", ()),
        ("Backend.of", "attribute", ()),
        ("Backend", "fields", ("kind", "size", "of")),
        ("Backend", "instance", ("runner", "a", "b", "c")),
        ("Backend.of", "literal", ("dsv4",)),
        ("Backend.of", "signature", ("cls", "value")),
        ("Backend.__init__", "signature", ("self", "runner")),
        ("call", "signature", ("a", "b", "*d", "**kwargs")),
        ("call", "signature", ("a", "*b", "*d", "*e")),
    ],
)
def test_fits(stand_in, name, kind, expected):
    assert stand_in(name, kind, *expected) == []


@pytest.mark.parametrize(
    "name, kind, expected, found",
    [
        ("gone", "attribute", (), "no such name"),
        ("Backend.gone", "signature", (), "no such name"),
        ("TABLE", "signature", (), "not a function"),
        ("Backend", "fields", ("kind", "colour"), "none of colour"),
        ("Backend", "instance", ("runner", "unset"), "none of unset"),
        ("Backend.of", "literal", ("dsv5",), "none of dsv5"),
        ("Backend.of", "signature", ("cls", "name"), "parameters (cls, value)"),
        # A new parameter without a default, one that moved, one that is no longer accepted.
        ("call", "signature", ("a", "*d"), "parameters (a, b, c, *d, *e, **rest)"),
        ("call", "signature", ("b", "a", "*d"), "parameters (a, b"),
        ("call", "signature", ("a", "b", "*d", "*f"), "parameters (a, b"),
        ("Backend.of", "signature", ("cls", "value", "**kwargs"), "parameters (cls, value)"),
    ],
)
def test_notices(stand_in, name, kind, expected, found):
    [mismatch] = stand_in(name, kind, *expected)
    assert mismatch.seam == f"sglang.srt.thing.{name}"
    assert found in mismatch.found


def test_missing_module_is_a_mismatch(stand_in):
    [mismatch] = seams.check([Seam("sglang.srt.nowhere", "x", "attribute", (), "test")])
    assert mismatch.found == "no such module"


def test_missing_sglang_is_a_mismatch(monkeypatch):
    monkeypatch.setattr(seams.importlib.util, "find_spec", lambda name: None)
    [mismatch] = seams.check()
    assert mismatch.seam == "sglang" and seams.SUPPORTED in mismatch.expected


# Commands of their own, which say themselves what is missing; a server loads none of them.
TOOLS = ("doctor.py", "trial.py", "models.py")


def sglang_imports(bench):
    """(file, module, name) of each SGLang name that a server with our backend, or the benchmark, imports."""
    root = pathlib.Path(sglang_dsv41.__file__).parent
    measuring = set((root / "bench").glob("*.py"))
    for path in sorted(measuring if bench else set(root.rglob("*.py")) - {root / name for name in TOOLS} - measuring):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang" and not node.level:
                for alias in node.names:
                    yield path.name, node.module, alias.name


@pytest.mark.parametrize("table, bench", [(seams.SEAMS, False), (seams.BENCH_SEAMS, True)], ids=["server", "bench"])
def test_table_names_everything_that_is_imported(table, bench):
    rows = {(row.module, row.name.split(".")[0]) for row in table}
    modules = {row.module for row in table}
    imports = list(sglang_imports(bench))
    missing = [item for item in imports if (item[1], item[2]) not in rows and f"{item[1]}.{item[2]}" not in modules]
    assert imports and missing == []
