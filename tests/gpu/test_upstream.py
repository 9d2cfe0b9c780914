"""SGLang's attention unittest kit (DSV4) on our backend, in a process of its own: scripts/run_upstream_tests.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import torch

from tests.devices import HAS_GPU

if not HAS_GPU or torch.cuda.get_device_capability()[0] not in (9, 10):
    pytest.skip("needs a CUDA GPU of compute capability 9.0 or 10.x (FlashMLA)", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


def test_attention_kit_on_our_backend():
    """Every case passes; what is skipped is what there is only without a GPU."""
    command = [sys.executable, ROOT / "scripts/run_upstream_tests.py", "--", "-q", "-W", "ignore"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "34 passed, 15 skipped" in done.stdout
    skips = re.findall(r"^SKIPPED \[\d+\] .*: (.*)$", done.stdout, re.MULTILINE)
    assert skips == ["the cases above cover it on a GPU"]
