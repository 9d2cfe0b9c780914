#!/usr/bin/env python3
"""Kernel times of the index layers; the same as `dsv41-sparse bench kernels`, into benchmarks/results/kernels.json."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sglang_dsv41.bench.kernels import main

if __name__ == "__main__":
    sys.exit(main(program=[__file__], out=ROOT / "benchmarks/results/kernels.json"))
