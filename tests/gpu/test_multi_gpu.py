"""Two GPUs of one host: the kernels on a second device, and the servers of scripts/multi_gpu.py in its quick form.

The kernels on a side stream need one GPU only. The servers need two of 60 GB and SGLang 0.5.23.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import torch

from tests.devices import HAS_GPU

if not HAS_GPU:
    pytest.skip("needs a CUDA GPU of compute capability 8.0 or newer", allow_module_level=True)

from tests.unit.test_multi_gpu import multi_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GPUS = torch.cuda.device_count()
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs of one host, found {GPUS}")
# Rows whose whole context are candidates, and longer ones; in one dense pass and in several.
LENGTHS = {"short": (0, 1, 63, 64, 4096, 16384), "long": (20000, 131072, 0, 40000)}


@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize(
    "device, side_stream",
    [
        pytest.param("cuda:0", True, id="side stream"),
        pytest.param("cuda:1", False, id="second device", marks=two_gpus),
        pytest.param("cuda:1", True, id="side stream of the second device", marks=two_gpus),
    ],
)
def test_kernels_elsewhere_give_the_same(kernels_on_gpu, device, side_stream, lens):
    name = kernels_on_gpu.partition("-")[0]
    base = multi_gpu.kernel_outputs(name, "cuda:0", lens=LENGTHS[lens])
    other = multi_gpu.kernel_outputs(name, device, side_stream=side_stream, blocks=base["chosen"], lens=LENGTHS[lens])
    assert multi_gpu.differing(base, other) == []


@pytest.mark.server
@pytest.mark.timeout(1800)
@two_gpus
@pytest.mark.parametrize("part", ["tp", "dp", "cp"])
def test_two_ranks(part, tmp_path):
    """Tokens and selections of two ranks, by the script's own checks."""
    out, logs = tmp_path / "multi_gpu.json", tmp_path / "logs"
    command = [sys.executable, multi_gpu.__file__, "--quick", "--only", part, "--cases", "decode 2x2048"]
    run = subprocess.run(
        [*command, "--out", out, "--log-dir", logs],
        cwd=Path(multi_gpu.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    keep = os.environ.get("DSV41_TEST_LOGS")
    if keep:
        shutil.copytree(logs, Path(keep) / f"multi_gpu-{part}", dirs_exist_ok=True)
    assert out.exists(), run.stderr[-4000:]
    checks = json.loads(out.read_text())["checks"]
    assert checks and all(check["outcome"] == "passed" for check in checks), checks
    assert run.returncode == 0, run.stderr[-4000:]
