"""Kernel times of the index layers: SGLang's Hopper kernels and ours, interleaved in one run under CUDA graph replay.

examples:
  {program}                                        # every case
  {program} --cases 'consumer_pass 8x131072' --rounds 5
  {program} --kernels portable --out portable.json # the Triton set as ours

A case is a kind, then ROWSxCONTEXT, or REQUESTSxROWSxCONTEXT for rows of one request that share keys; a context is a
multiple of 64, from 16384 on. Needs one CUDA GPU of compute capability 9.0 and SGLang {supported}. Each case rotates over
several input sets whose keys together exceed the L2 cache; a sample is the mean over one replay of a graph that runs every
set once; medians of the samples are reported. `bytes` counts what a case must read and write at least: packed keys,
scales and logits. `portable` is the median of the Triton set in the same run. The file is written after every case.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .. import seams
from . import machine
from .progress import Progress
from .results import ResultFile, command_line

PROGRAM = ("dsv41-sparse", "bench", "kernels")
OUT = Path("kernels.json")
KINDS = ("sparse_logits", "consumer_pass", "dense_logits", "verify_dense", "source_pass", "full_pass")
SHAPES = [(1, 131072), (8, 131072), (32, 131072), (128, 131072), (8, 1048576), (32, 262144)]
DENSE_SHAPES = [(1, 131072), (8, 131072), (32, 131072), (8, 1048576)]
# The candidates' width: below it a row has fewer blocks than the schedule takes.
LEAST_CONTEXT, PAGE_SLOTS = 16384, 64
NEEDED = "a CUDA GPU of compute capability 9.0 (H100, H200, H20), since the cases compare with SGLang's Hopper kernels"


class CaseName(NamedTuple):
    """A case by its name; `group` rows of each request share its keys."""

    kind: str
    requests: int
    group: int
    context: int

    @classmethod
    def parse(cls, text: str) -> CaseName:
        found = re.fullmatch(r"(\w+) ([1-9]\d*)x(?:([1-9]\d*)x)?([1-9]\d*)", text.strip())
        if found is None or found[1] not in KINDS:
            raise ValueError(f"case {text!r} is not KIND ROWSxCONTEXT with one of {', '.join(KINDS)}")
        name = cls(found[1], int(found[2]), int(found[3] or 1), int(found[4]))
        if name.context < LEAST_CONTEXT or name.context % PAGE_SLOTS:
            raise ValueError(f"case {text!r}: a context is a multiple of {PAGE_SLOTS}, from {LEAST_CONTEXT} on")
        return name

    def __str__(self) -> str:
        sizes = (self.requests, self.group, self.context) if self.group > 1 else (self.requests, self.context)
        return f"{self.kind} {'x'.join(map(str, sizes))}"


def all_cases() -> list[str]:
    names = [f"{kind} {r}x{c}" for kind in ("sparse_logits", "consumer_pass") for r, c in SHAPES]
    names += [f"{kind} {r}x{c}" for kind in ("dense_logits", "source_pass", "full_pass") for r, c in DENSE_SHAPES]
    return [*names, "verify_dense 8x6x131072"]


def parse_arguments(
    argv: Sequence[str] | None = None, program: Sequence[str] = PROGRAM, out: Path = OUT
) -> argparse.Namespace:
    command = command_line(program)
    parser = argparse.ArgumentParser(
        prog=command,
        description=__doc__.format(program=command, supported=seams.SUPPORTED),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", nargs="+", metavar="CASE", help=f"default: {', '.join(all_cases())}")
    add("--rounds", type=int, default=15, metavar="N", help="interleaved samples a side (default: %(default)s)")
    add("--kernels", default="hopper", choices=("hopper", "portable"), help="our kernel set (default: %(default)s)")
    add("--out", type=Path, default=out, metavar="FILE", help="result file (default: %(default)s)")
    add("--commit", default=None, help="for the result file, where there is no git")
    add("--no-progress", action="store_true", help="no progress bar; there is none either where stderr is no terminal")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    try:
        options.cases = [CaseName.parse(text) for text in options.cases or all_cases()]
    except ValueError as error:
        parser.error(f"{error}; --help lists the default cases")
    return options


def main(argv: Sequence[str] | None = None, *, program: Sequence[str] = PROGRAM, out: Path = OUT) -> int:
    """``dsv41-sparse bench kernels``; 1 when a kernel computes something else than SGLang's, 2 when nothing can be
    measured here. ``program`` is how it was called, ``out`` the default result file."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parse_arguments(argv, program, out)
    try:
        machine.require_gpu(NEEDED, (9, 0))
        machine.require_sglang(seams.BENCH_SEAMS)
    except machine.MachineError as error:
        print(f"{command_line(program)}: {error}", file=sys.stderr)
        return 2
    from . import kernel_cases

    unmet = kernel_cases.unmet(options.kernels)
    if unmet:
        print(f"{command_line(program)}: {unmet}; --kernels portable measures the Triton set", file=sys.stderr)
        return 2
    results = ResultFile(options.out, "kernels", argv=[*program, *argv], commit=options.commit)
    try:
        with Progress(len(options.cases), show=not options.no_progress) as progress:
            for name in options.cases:
                kernel_cases.run_case(name, options.rounds, results, options.kernels, progress)
                progress.done()
    except kernel_cases.WrongResult as error:
        print(f"{command_line(program)}: {error}", file=sys.stderr)
        return 1
    finally:
        if results.rows:
            print(results.table(), flush=True)
    return 0
