"""The matrix of docs/compatibility.md: every mode has a cell a GPU family, and every test that a cell names exists."""

import re
from pathlib import Path

import pytest

from tests.unit.test_cases_table import functions_of

ROOT = Path(__file__).resolve().parents[2]
LINES = re.findall(r"^\| (.*) \|$", (ROOT / "docs/compatibility.md").read_text(encoding="utf-8"), re.MULTILINE)
HEADER, *ROWS = (line.split(" | ") for line in LINES)
FAMILIES = ["Hopper (9.0)", "SM80", "SM89", "SM120", "SM100 (10.x)"]
CELL = re.compile(r"not run|(tested here|stand-in) \(`(tests/[\w/]+\.py)::(\w+)`\)")
# What the backend serves or refuses: a row's mode begins with one of these.
MODES = ("decode", "verify", "extend", "prefix hits", "late-layer tail", "prefill CUDA graph", "phases split")
MODES += ("tensor", "DP attention", "context-parallel prefill", "PD disaggregation", "HiCache", "two-batch overlap")


def test_the_matrix_is_whole():
    assert HEADER == ["mode", *FAMILIES]
    assert all(len(row) == len(HEADER) for row in ROWS)
    modes = [mode for mode, *_ in ROWS]
    assert len(set(modes)) == len(modes)
    assert [name for name in MODES if not any(mode.startswith(name) for mode in modes)] == []


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_cell_is_of_a_kind_and_its_test_exists(row):
    for family, cell in zip(FAMILIES, row[1:]):
        match = CELL.fullmatch(cell)
        assert match, f"{family}: {cell!r} is no 'tested here (`path::name`)', 'stand-in (...)' or 'not run'"
        kind, path, name = match.groups()
        if kind:
            assert name in functions_of(ROOT / path), f"{family}: {path} has no {name}"
            # Kernel tests run on whatever there is; those of tests/gpu on a GPU only.
            assert (kind == "tested here") == path.startswith(("tests/gpu/", "tests/kernels/")), f"{family}: {cell}"
        if kind == "tested here":
            assert family.startswith("Hopper"), "no other GPU has run the tests"
