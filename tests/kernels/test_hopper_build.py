"""The Hopper kernels' CUDA code compiles for sm_90a, with no GPU at hand, to code of the size that its launches assume.

Needs an ``nvcc`` of release 12.4 or newer: of a CUDA toolkit on PATH, or the one that comes with SGLang from PyPI.
"""

import dataclasses
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

HOPPER = Path(__file__).resolve().parents[2] / "sglang_dsv41/kernels/hopper"
FLAGS = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v"]
OLDEST = (12, 4)
REGISTERS = 65536  # of a multiprocessor, and the most of a thread block


@dataclasses.dataclass
class Kernel:
    """What ``ptxas -v`` and the PTX say of one kernel."""

    registers: int
    spilled: int  # bytes, the larger of stores and loads
    threads: int
    blocks: int  # that a multiprocessor holds at least


def wheel_compiler() -> Path | None:
    """The ``nvcc`` of the package nvidia-cuda-nvcc."""
    nvidia = find_spec("nvidia")
    places = [] if nvidia is None else [Path(p) / "cu13/bin/nvcc" for p in nvidia.submodule_search_locations or ()]
    return next((p for p in places if p.is_file()), None)


def release(nvcc: Path) -> tuple[int, int]:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def compiler() -> Path:
    on_path, wheel = shutil.which("nvcc"), wheel_compiler()
    if on_path and release(Path(on_path)) >= OLDEST:
        return Path(on_path)
    if wheel and release(wheel) >= OLDEST:
        return wheel
    pytest.skip(
        "needs nvcc of CUDA 12.4 or newer, on PATH or from the package nvidia-cuda-nvcc (site-packages/nvidia/cu13/bin)"
    )


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """(ptxas's messages, kernels by mangled name); compiled once, 20 s."""
    tvm_ffi = find_spec("tvm_ffi")
    if tvm_ffi is None:
        pytest.skip("needs apache-tvm-ffi, which comes with SGLang, for its headers")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler (g++) on PATH, nvcc's host compiler")
    nvcc = compiler()
    folder = tmp_path_factory.mktemp("hopper")
    (folder / "hopper.cu").write_text('#include "hopper_ffi.cuh"\n')
    includes = ["-I", str(Path(tvm_ffi.origin).parent / "include"), "-I", str(HOPPER)]
    command = [nvcc, *FLAGS, *includes, "--keep", "-c", "hopper.cu", "-o", "hopper.o"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NVCC_")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    messages = done.stdout + done.stderr
    assert done.returncode == 0, messages[-4000:]
    return messages, kernels(messages, (folder / "hopper.ptx").read_text())


def kernels(messages: str, ptx: str) -> dict[str, Kernel]:
    bounds = {}
    for name, head in re.findall(r"\.entry (\w+)\((.*?)\{", ptx, re.DOTALL):
        threads, blocks = re.search(r"\.maxntid (\d+)", head), re.search(r"\.minnctapersm (\d+)", head)
        bounds[name] = int(threads[1]) if threads else 1024, int(blocks[1]) if blocks else 1
    found = {}
    for part in messages.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", part)[1]
        spilled = max(int(n) for n in re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        found[name] = Kernel(registers, spilled, *bounds[name])
    return found


def named(build, part: str) -> dict[str, Kernel]:
    """The kernels with ``part`` in their mangled name, of which there must be some."""
    found = {name: kernel for name, kernel in build[1].items() if part in name}
    assert found, (part, list(build[1]))
    return found


def test_every_kernel_is_built(build):
    """Scoring for one row and for groups, up to 32 heads and up to 64, with block maxima and without; both selections."""
    for rows in (1, 8):
        for passes in (1, 2):
            assert len(named(build, f"index_logits_kernelILi{rows}ELi{passes}E")) == 2
    for cluster in (1, 2, 4, 8):
        named(build, f"source_topk_kernelILi{cluster}E")


def test_products_are_not_serialised(build):
    """ptxas's C75xx: it waits after each WGMMA, because code in between touches its registers."""
    lines = [line for line in build[0].splitlines() if "C75" in line or "serialized" in line]
    assert not lines


def test_registers_fit(build):
    """As many thread blocks as a multiprocessor is to hold; registers are given out by 8 a thread."""
    for name, kernel in build[1].items():
        taken = -(-kernel.registers // 8) * 8 * kernel.threads * kernel.blocks
        assert taken <= REGISTERS, (name, kernel)


def test_the_decode_kernels_spill_next_to_nothing(build):
    """Scoring of single rows of up to 32 heads."""
    for name, kernel in named(build, "index_logits_kernelILi1ELi1E").items():
        assert kernel.spilled < 64, (name, kernel)


def test_the_selections_spill_nothing(build):
    for name, kernel in named(build, "source_topk").items():
        assert kernel.spilled == 0, (name, kernel)
