"""Every Triton kernel compiles to machine code for each GPU family, with no GPU at hand.

What runs there is another matter; this catches what a family's compiler refuses.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {"dense bf16", "sparse bf16", "sparse bf16 wide", "block maxima", "expand", "map columns", "map positions"}
HOPPER = {"unpack", "extend maxima"}
FP8 = {"dense fp8", "sparse fp8", "sparse fp8 wide"}


def compiled(capability: int, cache: Path) -> dict:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.kernels.compile_worker", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_kernels_compile(capability, tmp_path):
    report = compiled(capability, tmp_path)
    assert set(report) == KERNELS | (FP8 if capability >= 89 else set()) | (HOPPER if capability == 90 else set())
    for name, kernel in report.items():
        assert kernel["cubin"] > 0 and not kernel["local memory"], (name, kernel)
    if capability != 100:  # tensor memory has product instructions of another name
        assert report["sparse bf16"]["bf16 product"] and not report["sparse bf16"]["e5m2"]
    if capability == 90:
        # What docs/performance.md says of Hopper: FP8 products, by warpgroup instructions.
        for name in FP8:
            assert report[name]["wgmma"] and report[name]["e5m2"] and not report[name]["bf16 product"]
