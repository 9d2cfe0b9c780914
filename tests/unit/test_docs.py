"""The docs name what a user meets: every requirement and environment variable, and the memory that the backend takes."""

import ast
import re
from pathlib import Path

import pytest

from sglang_dsv41 import envs

ROOT = Path(__file__).resolve().parents[2]
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")


def requirement_names():
    """The first argument of each ``Unmet(...)`` of the requirements."""
    source = ast.parse((ROOT / "sglang_dsv41/requirements.py").read_text(encoding="utf-8"))
    calls = [
        node for node in ast.walk(source) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Unmet"
    ]
    return sorted({call.args[0].value for call in calls})


def test_there_are_requirements():
    assert len(requirement_names()) > 10


@pytest.mark.parametrize("name", requirement_names())
def test_troubleshooting_has_each_requirement(name):
    rows = [line.split("|")[1] for line in TROUBLESHOOTING.splitlines() if line.startswith("| ")]
    assert any(name in re.split(r",\s*", row.strip()) for row in rows), rows


@pytest.mark.parametrize("name", envs.NAMES)
@pytest.mark.parametrize("page", ["README.md", "docs/design.md", "docs/deployment.md", "docs/troubleshooting.md"])
def test_each_environment_variable_is_documented(name, page):
    assert name in (ROOT / page).read_text(encoding="utf-8")


def test_each_series_is_documented():
    """Series and checks of a server with --enable-metrics and an audit, and what the audit's bounds are."""
    pytest.importorskip("sglang")
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    from sglang_dsv41.audit import CHECKS, LEAST, MAX_ROWS, MOST, ROUNDING
    from sglang_dsv41.metrics import Metrics
    from tests.candidates import RELEASED

    Metrics({"model_name": "m"}, RELEASED, audited=True, registry=registry)
    page = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    for family in registry.collect():
        total = "_total" if family.type == "counter" else ""
        assert f"`{family.name}{total}`" in page, family.name
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `") and "| at " in line}
    assert set(rows) == {*LEAST, *MOST}
    assert all(f"at least {bound:g}" in rows[name] for name, bound in LEAST.items())
    assert MOST == {"logit_difference": 2**-6} and "at most 2^-6" in rows["logit_difference"]
    assert all(f"`{check}`" in page for check in CHECKS)
    assert f"at most {MAX_ROWS} rows a layer and step" in page and ROUNDING == 2**-8 and "2^-8" in page


def test_ci_runs_the_readmes_test_command():
    command = "scripts/run.sh test"
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (".ci/run", ".github/workflows/ci.yml"):
        assert command in (ROOT / page).read_text(encoding="utf-8")


def test_the_memory_table_is_what_is_allocated():
    pytest.importorskip("torch")
    from sglang_dsv41.rows import RowBuffers
    from tests.candidates import RELEASED

    page = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) MiB \|$", page, re.MULTILINE)
    assert len(rows) > 3
    for requests, drafts, chunk, said in (map(int, row) for row in rows):
        decode = requests * drafts
        buffers = RowBuffers(
            RELEASED,
            max_rows=max(decode, chunk + requests),
            scratch_bytes=envs.DEFAULT_SCRATCH_MB << 20,
            max_context=1 << 20,
            dense_rows=decode,
            device="meta",
        )
        assert round(buffers.nbytes / 2**20) == said, (requests, drafts, chunk)
