"""Compiles our Triton kernels for one GPU family, with no GPU: `python -m tests.kernels.compile_worker CAPABILITY`.

Prints a JSON object, kernel to what its PTX holds. In a process of its own, because Triton's interpreter replaces the
compiler in the tests' process.
"""

import json
import os
import re
import sys

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dsv41.kernels import expansion, scoring, selection
from sglang_dsv41.kernels.hopper import extend

# Run-time arguments by their names' endings; what is not here is a constant of the kernel.
POINTERS = {
    "q_ptr": "*bf16",
    "weights_ptr": "*bf16",
    "logits_ptr": "*bf16",
    "out_ptr": "*bf16",
    "maxima_ptr": "*bf16",
    "pool_ptr": "*u8",
    "scales_ptr": "*fp32",
}
SCORING = {"H": 32, "PAGE_SLOTS": 64, "TILE": 64, "WIDE": False, "UPCAST": False}
KERNELS = {
    "dense bf16": (scoring._paged_logits_kernel, {**SCORING, "TABLE_SLOTS": 64, "FP8": False}, 4),
    "sparse bf16": (scoring._paged_logits_kernel, {**SCORING, "TABLE_SLOTS": 8, "FP8": False}, 4),
    "dense fp8": (scoring._paged_logits_kernel, {**SCORING, "TABLE_SLOTS": 64, "FP8": True}, 4),
    "sparse fp8": (scoring._paged_logits_kernel, {**SCORING, "TABLE_SLOTS": 8, "FP8": True}, 4),
    "sparse bf16 wide": (scoring._paged_logits_kernel, {**SCORING, "TABLE_SLOTS": 8, "FP8": False, "WIDE": True}, 4),
    "sparse fp8 wide": (scoring._paged_logits_kernel, {**SCORING, "TABLE_SLOTS": 8, "FP8": True, "WIDE": True}, 4),
    "block maxima": (expansion._block_max_kernel, {"BLOCK": 24, "BLOCK_P2": 32, "TILE": 128}, 4),
    "expand": (
        expansion._expand_kernel,
        {"TOPK": 2048, "TOPK_P2": 2048, "BLOCK": 8, "KERNEL_BLOCK": 8, "EXPANSION": 1, "TABLE_SLOTS": 64},
        8,
    ),
    "map columns": (selection._map_columns_kernel, {"TOPK": 512, "WIDTH_P2": 512, "KERNEL_BLOCK": 8}, 4),
    "map positions": (selection._map_positions_kernel, {"TOPK": 512, "WIDTH_P2": 512, "TABLE_SLOTS": 64}, 4),
}
HOPPER_KERNELS = {
    "unpack": (extend._unpack_kernel, {"TABLE_SLOTS": 256, "PAGE_SLOTS": 64, "TILE": 64}, 4),
    "extend maxima": (extend._maxima_kernel, {"TABLE_SLOTS": 256, "PAGE_SLOTS": 64, "TILE": 256}, 4),
}


def pointer_of(kernel, name: str) -> str:
    if name == "keys_ptr":
        return "*fp32" if kernel is expansion._block_max_kernel else "*u8"
    return POINTERS.get(name, "*i32")


def main() -> None:
    capability = int(sys.argv[1])
    report = {}
    for name, (kernel, constants, warps) in (KERNELS | (HOPPER_KERNELS if capability == 90 else {})).items():
        if "fp8" in name and capability < 89:
            continue  # no FP8 tensor cores; the set does not ask for them there
        signature = {
            argument: "constexpr"
            if argument in constants
            else pointer_of(kernel, argument)
            if argument.endswith("_ptr")
            else "i32"
            for argument in kernel.arg_names
        }
        # Triton finds at launch that torch's tensors start on 16 bytes; here it is told.
        aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a.endswith("_ptr")}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        ptx = compiled.asm["ptx"]
        report[name] = {
            "cubin": len(compiled.asm["cubin"]),
            "wgmma": "wgmma.mma_async" in ptx,
            "e5m2": "e5m2" in ptx,
            "bf16 product": "bf16.bf16" in ptx,
            "local memory": ".local " in ptx,
            "byte loads": len(re.findall(r"ld\.global\S*\.[bu]8 ", ptx)),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
