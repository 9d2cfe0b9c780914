#!/usr/bin/env python3
"""Count the machine instructions of the scoring kernel's loop for Hopper, with no GPU.

    python scripts/loop_instructions.py              # -> benchmarks/results/loop_instructions.json

Compiles `sglang_dsv41/kernels/scoring.py` for compute capability 9.0 and disassembles it with the tools in Triton's
package. A row's `stock` is byte-wise loads and `ours` wide loads (ScoringConfig.wide), in instructions a loop pass, that
is a tile of columns; `registers` has both sides' registers a thread. A count is no time: it says where to look.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dsv41.bench.results import ResultFile
from sglang_dsv41.kernels.scoring import _paged_logits_kernel as kernel
from tests.kernels.compile_worker import SCORING, pointer_of

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
TILES_AND_WARPS = ((64, 4), (128, 4), (128, 8))


def compiled(constants: dict, warps: int):
    signature = {
        name: "constexpr" if name in constants else pointer_of(kernel, name) if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n.endswith("_ptr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def longest_loop(lines: list[str]) -> list[str]:
    """Opcodes between a label and the last branch back to it, of the loop with most lines."""
    labels = {line.strip()[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line.strip())}
    loops = [(0, 0)]
    for i, line in enumerate(lines):
        target = re.search(r"BRA\s+`\((\.L_x_\d+)\)", line)
        if target and labels.get(target.group(1), i) < i:
            loops.append((labels[target.group(1)], i))
    start, stop = max(loops, key=lambda loop: loop[1] - loop[0])
    return [found.group(1) for line in lines[start : stop + 1] if (found := INSTRUCTION.search(line))]


def count(constants: dict, warps: int) -> tuple[int, int]:
    """(instructions of the loop, registers a thread)."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled(constants, warps).asm["cubin"])
        run = dict(capture_output=True, text=True, check=True)
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], **run).stdout.splitlines()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], **run)
    return len(longest_loop(sass)), int(re.search(r"REG:(\d+)", usage.stdout + usage.stderr).group(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/loop_instructions.json", help="result file")
    results = ResultFile(parser.parse_args().out, "loop_instructions")
    results.content["gpu"] = "none: compiled for compute capability 9.0"
    for fp8 in (True, False):
        for tile, warps in TILES_AND_WARPS:
            sides = [
                count({**SCORING, "TABLE_SLOTS": 8, "TILE": tile, "FP8": fp8, "WIDE": wide}, warps)
                for wide in (False, True)
            ]
            results.add(
                f"{'fp8' if fp8 else 'bf16'} {tile}x{warps}",
                "instructions",
                stock=[sides[0][0]],
                ours=[sides[1][0]],
                registers=[registers for _, registers in sides],
                ratio=round(sides[0][0] / sides[1][0], 3),
            )
    print(results.table())


if __name__ == "__main__":
    main()
