#!/usr/bin/env python3
"""Write a small random-weight DeepSeek-V4.1 model folder; the same as `dsv41-sparse model`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_dsv41.models import main

if __name__ == "__main__":
    sys.exit(main())
