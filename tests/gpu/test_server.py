"""A real SGLang server on a Hopper GPU: dsv41-sparse against stock, on the small random-weight model.

Needs one GPU of compute capability 9.0 with 60 GB free and SGLang 0.5.23. DSV41_TEST_LOGS keeps the server logs and
reports in a folder.
"""

import concurrent.futures
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_dsv41.models import write_model

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).resolve().parent / "probe"
CONTEXT = 135168
LENGTHS = (300, 20000, 131072)
NEW_TOKENS = 16
CHUNK = 8192
pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(900)]


def engine_args(model: Path, backend: str, **changes) -> dict:
    args = dict(
        model_path=str(model),
        load_format="dummy",
        attention_backend=backend,
        context_length=CONTEXT,
        # The engines of this module run at once on one GPU.
        mem_fraction_static=0.7,
        max_total_tokens=300_000,
        cuda_graph_max_bs_decode=8,
        disable_flashinfer_autotune=True,
        random_seed=1,
        log_level="info",
        skip_tokenizer_init=True,
        chunked_prefill_size=CHUNK,
    )
    return {**args, **changes}


def run_engine(folder: Path, name: str, engine: dict, requests: list[dict], *, probe: bool) -> tuple[dict, dict, str]:
    """(report, probe report, log) of one engine that serves `requests` one after the other."""
    job, out, log = folder / f"{name}.job.json", folder / f"{name}.json", folder / f"{name}.log"
    report = folder / f"{name}.probe.json"
    job.write_text(json.dumps({"engine": engine, "requests": requests, "out": str(out)}))
    environment = dict(os.environ)
    path = [str(ROOT), *([str(PROBE)] if probe else []), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
    if probe:
        environment["DSV41_PROBE_OUT"] = str(report)
    with log.open("w") as file:
        code = subprocess.run(
            [sys.executable, "-m", "tests.gpu.engine_worker", str(job)],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=800,
        ).returncode
    text = log.read_text(errors="replace")
    keep = os.environ.get("DSV41_TEST_LOGS")
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
        for file in (out, log, report):
            if file.exists():
                shutil.copy(file, keep)
    assert code == 0, text[-6000:]
    return json.loads(out.read_text()), json.loads(report.read_text()) if probe else {}, text


def prompts() -> list[dict]:
    """Each length cold, then again on its prefix; last a short one, whose extend writes the probe's report."""
    ids = {n: [random.Random(n).randrange(16, 4000) for _ in range(n)] for n in LENGTHS}
    requests = [{"ids": ids[n], "new": NEW_TOKENS} for n in LENGTHS for _ in ("cold", "hit")]
    return [*requests, {"ids": ids[LENGTHS[0]][:40], "new": 1}]


@pytest.fixture(scope="module")
def engines():
    """Three engines at once: ours and stock on the same prompts, and ours with a DSpark draft."""
    folder = Path(tempfile.mkdtemp(prefix="dsv41-server-"))
    tiny, dspark = folder / "tiny", folder / "dspark"
    write_model(tiny, "tiny")
    write_model(dspark, "tiny", dspark=True)
    ids = prompts()[2]["ids"]
    drafted = [{"ids": ids, "new": 24}, {"ids": ids[:400], "new": 24}, {"ids": ids[:40], "new": 1}]
    jobs = {
        "ours": (engine_args(tiny, "dsv41-sparse"), prompts(), True),
        "stock": (engine_args(tiny, "dsv4"), prompts(), False),
        "dspark": (engine_args(dspark, "dsv41-sparse", speculative_algorithm="DSPARK"), drafted, True),
    }
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        futures = {
            name: pool.submit(run_engine, folder, name, engine, requests, probe=probe)
            for name, (engine, requests, probe) in jobs.items()
        }
        yield futures
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ours(engines):
    return engines["ours"].result()


@pytest.fixture
def stock(engines):
    return engines["stock"].result()


def test_backend_serves_with_cuda_graphs(ours):
    _, _, log = ours
    assert "dsv41-sparse: layers [8, 9, 10, 11] score 2048 blocks of 8 positions a row" in log
    assert "Kernels: hopper" in log
    assert "Serves prefill and decode" in log
    assert "Capture target decode CUDA graph end. bs=[1, 2, 4, 8]" in log and "cuda graph: True" in log


def test_selections_equal_stock(ours):
    _, probe, _ = ours
    assert probe["source"]["blocks"] <= 1e-2, probe["source"]
    for mode in ("source", "decode", "extend"):
        seen = probe[mode]
        assert seen["rows"] > 0 and seen["short"] == 0, (mode, seen)
        assert seen["missed"] <= 2e-2, (mode, seen)
        assert seen["overlap"] >= 0.99, (mode, seen)
        assert seen["gap"] <= 2e-2, (mode, seen)


def test_consumers_ran_sparse_in_every_mode(ours):
    """Four consumers a decode step, replays counted on the device; extend by chunks."""
    _, probe, _ = ours
    steps = len(LENGTHS) * 2 * (NEW_TOKENS - 1)
    assert probe["decode"]["calls"] >= 4 * steps
    assert probe["extend"]["calls"] >= 4 * len(LENGTHS) * 2


def test_tokens_equal_stock(ours, stock):
    assert ours[0]["tokens"] == stock[0]["tokens"]


def test_prefix_hits(ours):
    report = ours[0]
    for i, length in enumerate(LENGTHS):
        cold, hit = report["cached"][2 * i : 2 * i + 2]
        assert cold == 0, (length, cold)
        # SGLang keeps the sliding-window state of whole chunks, so a hit may end a chunk early.
        assert hit >= length - CHUNK or length < CHUNK, (length, hit)
        assert report["tokens"][2 * i] == report["tokens"][2 * i + 1], f"prefix hit at {length} changed the tokens"


def test_verify_rows_run_sparse(engines):
    """DSpark's target-verify rows go through the sparse path, with selections equal to SGLang's."""
    _, probe, log = engines["dspark"].result()
    seen = probe["verify"]
    assert seen["calls"] >= 4 and seen["rows"] > 0 and seen["short"] == 0, (seen, log[-2000:])
    assert seen["overlap"] >= 0.99 and seen["gap"] <= 2e-2, seen
