"""The table of tests/README.md: every number has a row, and every test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "tests/README.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+ \|", line)
]


def functions_of(path: Path) -> set[str]:
    """Names of the test functions that pytest collects from a file's top level."""
    return {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_number_has_one_row():
    assert [int(number) for number, *_ in ROWS] == list(range(1, 35))
    assert all(len(row) == 3 and row[1] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_named_tests_exist(row):
    """A row names a test, or says why there is none yet; a name that is gone is an error."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[2])
    assert row[2].count("::") == len(named), "a test is not spelled `path::name`"
    assert named or re.match(r"not yet: \w+", row[2])
    for path, name in named:
        assert name in functions_of(ROOT / path), f"{path} has no {name}"
