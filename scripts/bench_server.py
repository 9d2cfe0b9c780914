#!/usr/bin/env python3
"""Decode and prefill of two engines; the same as `dsv41-sparse bench server`, into benchmarks/results/server.json."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sglang_dsv41.bench.server import main

if __name__ == "__main__":
    sys.exit(main(program=[__file__], out=ROOT / "benchmarks/results/server.json"))
