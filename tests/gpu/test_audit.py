"""A real SGLang server whose extends are audited: a clean one, and one whose block lists are broken on purpose.

Needs one GPU of compute capability 9.0 with 60 GB free and SGLang 0.5.23. DSV41_TEST_LOGS keeps the logs and the metrics
in a folder.
"""

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest

from sglang_dsv41.models import write_model
from tests.gpu.test_server import PROBE, ROOT, engine_args
from tests.servers import Server

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(900)]
# Within the published blocks (16,384 positions) and past them.
LENGTHS = (300, 20000)
NEW_TOKENS = 8
START_SECONDS = 600


class AuditedServer(Server):
    """An SGLang server with an audit of every row that fits and its metrics."""

    def __init__(self, model: Path, log: Path, **environment: str) -> None:
        arguments = ["--enable-metrics"]
        # Two such servers run at once.
        for name, value in engine_args(model, "dsv41-sparse", max_total_tokens=100_000).items():
            arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        path = [str(ROOT), str(PROBE), os.environ.get("PYTHONPATH", "")]
        environment |= {"DSV41_SPARSE_AUDIT": "1", "PYTHONPATH": os.pathsep.join(p for p in path if p)}
        super().__init__(log, arguments, environment=os.environ | environment, cwd=ROOT, start_seconds=START_SECONDS)


class Series:
    """The plugin's samples of a metrics page."""

    def __init__(self, page: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self.samples = [
            sample
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith("sglang:dsv41_sparse_")
        ]

    def __call__(self, name: str, **labels: str) -> float:
        found = [
            sample.value
            for sample in self.samples
            if sample.name == f"sglang:dsv41_sparse_{name}" and labels.items() <= sample.labels.items()
        ]
        assert found, f"no series {name} {labels}"
        return sum(found)


@pytest.fixture(scope="module")
def served():
    """(answers, log, series) of a clean and of a broken server, on the same prompts."""
    folder = Path(tempfile.mkdtemp(prefix="dsv41-audit-"))
    write_model(folder / "tiny", "tiny")
    servers = {
        "clean": AuditedServer(folder / "tiny", folder / "audit-clean.log"),
        "broken": AuditedServer(folder / "tiny", folder / "audit-broken.log", DSV41_BREAK_BLOCKS="1"),
    }
    out = {}
    try:
        for name, server in servers.items():
            server.wait_ready()
            answers = [
                server.generate([random.Random(n).randrange(16, 4000) for _ in range(n)], NEW_TOKENS, timeout=300)
                for n in LENGTHS
            ]
            page = server.metrics()
            (folder / f"audit-{name}.metrics").write_text(page)
            out[name] = answers, server.log, Series(page)
        yield out
    finally:
        for server in servers.values():
            server.stop()
        keep = os.environ.get("DSV41_TEST_LOGS")
        if keep:
            Path(keep).mkdir(parents=True, exist_ok=True)
            for file in [*folder.glob("audit-*.log"), *folder.glob("audit-*.metrics")]:
                shutil.copy(file, keep)
        shutil.rmtree(folder, ignore_errors=True)


def layers_of(log: str) -> tuple[str, list[str]]:
    """(source, consumers) by the line of the start: `layers [8, 9] score ..., published by layer 6`."""
    line = next(line for line in log.splitlines() if "published by layer" in line)
    consumers = line.split("layers [")[1].split("]")[0].split(", ")
    return line.split("published by layer ")[1].split(";")[0], consumers


def test_a_clean_server_passes(served):
    answers, log, series = served["clean"]
    assert [len(ids) for ids in answers] == [NEW_TOKENS] * len(LENGTHS)
    assert "dsv41-sparse audit: a share of 1 of the rows of each extend" in log
    assert "audit FAILED" not in log
    source, consumers = layers_of(log)
    assert consumers
    for layer in (source, *consumers):
        rows = series("audit_rows_total", layer=layer)
        assert rows >= 4
        # Every audited row measured something, and the mean is near 1.
        assert series("audit_selection_overlap_count", layer=layer) == rows
        assert series("audit_selection_overlap_sum", layer=layer) >= 0.99 * rows
        assert series("audit_failures_total", layer=layer) == 0
    assert series("audit_block_overlap_sum", layer=source) >= 0.99 * series("audit_rows_total", layer=source)


def test_the_metrics_count_what_ran(served):
    _, log, series = served["clean"]
    _, consumers = layers_of(log)
    for mode in ("decode", "extend"):
        rows, blocks = series("rows_total", mode=mode), series("blocks_scored_total", mode=mode)
        assert 0 < rows <= blocks <= 2048 * rows
        assert series("positions_skipped_total", mode=mode) > 0, "a request is longer than its candidates"
    # One row a request and step: all but the first token of each.
    assert series("rows_total", mode="decode") >= len(consumers) * len(LENGTHS) * (NEW_TOKENS - 1)
    assert series("rows_total", mode="verify") == 0


def test_a_broken_block_list_is_found(served):
    _, log, series = served["broken"]
    source, consumers = layers_of(log)
    failed, rows = (
        series("audit_failures_total", layer=source, check="block_overlap"),
        series("audit_rows_total", layer=source),
    )
    # Rows of one or two blocks lose none.
    assert rows / 2 < failed <= rows
    assert series("audit_block_overlap_bucket", layer=source, le="0.9") >= rows / 2
    assert f"dsv41-sparse audit FAILED: layer {source}, request row " in log
    assert "block_overlap is 0." in log and "must be at least 0.95" in log
    # The consumers did as they were told.
    assert all(series("audit_failures_total", layer=layer) == 0 for layer in consumers)
    assert series("audit_failures_total", layer=source, check="schedule") == 0
