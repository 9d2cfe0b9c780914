#!/usr/bin/env python3
"""Check and measure dsv41-sparse on two GPUs of one host, beside SGLang's own backend.

    python scripts/multi_gpu.py

Parts, each alone with --only:

    kernels  every kernel set that the GPU runs, on the second device of a process and on a side stream: bit for bit what
             it gives on the first device and the default stream
    tp       tensor parallelism 2: tokens, selections on both ranks, decode and prefill beside stock
    dp       DP attention 2: the same, with one rank idle and with unequal ranks
    cp       context-parallel prefill over two ranks, decode on both: the same; selections on both ranks in decode, and on
             each rank of its own rows in prefill

The model is the small one with the released 40 layers and random weights, drawn so that one GPU and two ranks serve the
same model. `tp`, `dp` and `cp` first serve the prompts on one GPU. The result file has the rows of scripts/bench_server.py,
each case named after its part, and a list `checks`: name, outcome (passed, failed or not run), detail. It is written after
every check and every case. Parts that are not run keep what the file has of them, if it is of the same commit.

Status: 0 when no check failed and every case was measured, 1 otherwise, 2 when the machine cannot run it.
"""

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sglang_dsv41.bench import server as bench
from sglang_dsv41.bench.results import ResultFile
from sglang_dsv41.bench.server import Case, EngineError, EngineProcess, Prompt

NEEDED = 2
PROBE = ROOT / "tests/gpu/probe"
PARTS = {
    "kernels": {},
    "tp": {"tp_size": 2},
    "dp": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "load_balance_method": "round_robin"},
    "cp": {"tp_size": 2, "enable_prefill_cp": True, "cp_strategy": "interleave"},
}
OUTCOMES = ("passed", "failed", "not run")
# Selections that every rank of a part makes, by the probe's modes; under context parallelism the rows of an extend are dealt.
SHARED_WORK = {"tp": ("decode", "verify", "extend"), "dp": (), "cp": ("decode", "verify")}
CASES = ("decode 8x2048", "decode 8x131072", "prefill 8x131072")
QUICK_CASES = ("decode 8x2048", "prefill 2x32768")
# Past the candidates' 16,384 positions a consumer has something to skip.
LENGTHS = (300, 20000, 131072)
QUICK_LENGTHS = (300, 20000)
NEW_TOKENS = 16
STREAM = 100  # the checks' prompts; the cases' count from 0
START_SECONDS = 900


class Gpu(NamedTuple):
    name: str
    capability: str


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by nvidia-smi: no library that takes long to load."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        if not visible.strip(" ,"):
            return []
        command += ["-i", visible]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [Gpu(*(cell.strip() for cell in line.rsplit(",", 1))) for line in lines if "," in line]


def too_few(gpus: Sequence[Gpu]) -> str | None:
    """Why the machine cannot run this, or None."""
    if len(gpus) >= NEEDED:
        return None
    found = ", ".join(f"{gpu.name} (compute capability {gpu.capability})" for gpu in gpus) or "none"
    return (
        f"found {len(gpus)} GPU{'' if len(gpus) == 1 else 's'} (nvidia-smi: {found}); needed: {NEEDED} of one host. "
        "Run it on such a host, or let CUDA_VISIBLE_DEVICES name two. What one GPU can show: tests/gpu."
    )


# ---- the result file ----


class Report:
    """The result file: rows as `ResultFile` has them, named after their part, and the checks."""

    def __init__(self, results: ResultFile, *, say=print):
        self.results = results
        self.say = say
        self.part = ""
        results.content["checks"] = []

    @property
    def checks(self) -> list[dict]:
        return self.results.content["checks"]

    def keep(self, parts: Sequence[str]) -> None:
        """Take over rows and checks of ``parts`` that the file has of the same commit, GPU and versions."""
        try:
            old = json.loads(self.results.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if any(old.get(key) != self.results.content[key] for key in ("name", "commit", "gpu", "versions")):
            return
        for key, name in (("rows", "case"), ("checks", "name")):
            self.results.content[key] += [one for one in old.get(key, []) if one[name].partition(":")[0] in parts]

    def check(self, name: str, outcome: str, detail: str) -> None:
        assert outcome in OUTCOMES, outcome
        self.checks.append({"name": f"{self.part}: {name}", "outcome": outcome, "detail": detail})
        self.say(f"{self.part}: {name}: {outcome}. {detail}")
        self.results.write()

    def judge(self, name: str, good: bool, detail: str) -> None:
        self.check(name, "passed" if good else "failed", detail)

    def add(self, case: str, unit: str, **row) -> dict:
        """As of `ResultFile`, the case named after its part."""
        return self.results.add(f"{self.part}: {case}", unit, **row)

    def failed(self) -> list[str]:
        return [check["name"] for check in self.checks if check["outcome"] in ("failed", "not run")]


# ---- kernels ----


def kernel_outputs(
    name: str,
    device: str,
    *,
    side_stream: bool = False,
    blocks=None,
    lens=(0, 1, 63, 4096, 20000, 40000),
    geometry=None,
) -> dict:
    """What a kernel set makes of one random step, on the CPU: for rows of ``lens`` positions the logits of the source, its
    picks and published blocks by their scores, and of ``blocks`` [rows, blocks] (of its own, if None) the schedule, a
    consumer's logits and its picks by their scores.

    By their scores, since of equal ones a top-k may take any. Torch or Triton errors pass through.
    """
    import torch

    from sglang_dsv41.geometry import INT32_MAX
    from sglang_dsv41.kernels import kernel_set_class
    from tests.candidates import RELEASED, consumer_pass, garbage, make_problem, poison, source_pass

    cuda = torch.device(device).type == "cuda"
    with torch.cuda.device(device) if cuda else contextlib.nullcontext():
        problem = make_problem(list(lens), geometry or RELEASED, device=device)
        poison(problem.rows)
        kernels = kernel_set_class(name)(problem.geometry, problem.buffers)
        if cuda:
            torch.cuda.synchronize()
        stream = torch.cuda.Stream() if side_stream else None
        with torch.cuda.stream(stream) if side_stream else contextlib.nullcontext():
            rows, count = problem.rows, problem.rows.num_rows
            slots = garbage(problem)
            dense = source_pass(problem, kernels, slots)
            position = torch.arange(dense.shape[1], device=device)
            visible = dense.float().masked_fill(position >= rows.lens[:, None], -torch.inf)
            # Pool slots by position, to read a pick's score from the dense logits.
            page = rows.block_table.long().gather(1, (position // rows.table_slots).expand(count, -1))
            slot_of = page * rows.table_slots + position % rows.table_slots
            by_slot = torch.full((count, int(slot_of.max()) + 2), -torch.inf, device=device)
            by_slot.scatter_(1, slot_of, visible)
            size = problem.geometry.block_size
            maxima = visible.unflatten(1, (-1, size)).amax(2)
            kept = torch.where(rows.sparse_indices == INT32_MAX, -1, rows.sparse_indices // problem.geometry.expansion)
            out = {"source logits": visible, "source picks": _scores(by_slot, slots), "blocks": _scores(maxima, kept)}
            chosen = kept if blocks is None else blocks.to(device)
            kernels.expand(chosen, rows, slice(0, count))
            out |= {"schedule": rows.sparse_indices.clone(), "valid columns": rows.end.clone()}
            out["physical blocks"] = rows.physical_blocks.clone()
            positions, slots = consumer_pass(problem, kernels)
            out |= {"picks": _scores(visible, positions), "picked slots": _scores(by_slot, slots)}
            tile = next(kernels.passes(count))
            logits = kernels.sparse_logits(problem.queries, problem.keys, rows, tile).float()
            column = torch.arange(logits.shape[1], device=device)
            out["consumer logits"] = logits.masked_fill(column >= rows.end[tile][:, None], -torch.inf)
            out["chosen"] = chosen
        if stream is not None:
            stream.synchronize()
        return {key: value.cpu() for key, value in out.items()}


def _scores(values, picks):
    """The picked values of each row, sorted; -inf for no pick."""
    picks = picks.long()
    taken = values.gather(1, picks.clamp(0, values.shape[1] - 1))
    return taken.masked_fill(picks < 0, float("-inf")).sort(1).values


def differing(first: dict, second: dict) -> list[str]:
    """Names of outputs that are not equal bit for bit."""
    import torch

    return [key for key in first if key != "chosen" and not torch.equal(first[key], second[key])]


def gpu_kernel_sets() -> list[str]:
    """The kernel sets that this process's GPU runs in tests."""
    from tests.devices import DEVICES

    return [name.partition("-")[0] for name in DEVICES if name.endswith("-cuda")]


def compare_kernels(send) -> None:
    """Body of the kernel process: (name, outcome, detail) of each comparison to ``send``, then None."""
    try:
        for name in gpu_kernel_sets():
            base = kernel_outputs(name, "cuda:0")
            for what, device, side in (
                ("on a side stream", "cuda:0", True),
                ("on the second device", "cuda:1", False),
                ("on a side stream of the second device", "cuda:1", True),
            ):
                try:
                    other = kernel_outputs(name, device, side_stream=side, blocks=base["chosen"])
                    wrong = differing(base, other)
                    detail = f"differ: {', '.join(wrong)}" if wrong else f"{len(base) - 1} outputs equal bit for bit"
                    send((f"{name} {what}", "failed" if wrong else "passed", detail))
                except Exception as error:  # noqa: BLE001 (the next set may run)
                    send((f"{name} {what}", "failed", f"{type(error).__name__}: {error}"))
    except Exception:  # noqa: BLE001 (the parent must learn of any failure)
        send(("kernel sets", "failed", traceback.format_exc(limit=3)))
    send(None)


def run_kernels(options, report: Report) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_kernel_process, args=(theirs,))
    process.start()
    theirs.close()
    seen = 0
    try:
        while ours.poll(START_SECONDS):
            found = ours.recv()
            if found is None:
                break
            report.check(*found)
            seen += 1
        else:
            report.check("kernels", "failed", f"no answer within {START_SECONDS} s")
    except EOFError:
        report.check("kernels", "failed", "the process died; its traceback is above")
    finally:
        process.kill()
        process.join()
    if not seen:
        report.check("kernels", "not run", "no kernel set of this project runs on this GPU in tests")


def _kernel_process(connection) -> None:
    compare_kernels(connection.send)


# ---- servers ----


def arguments_of(options, part: str | None = None) -> dict:
    """An engine's arguments in a part; on one GPU without one."""
    arguments = bench.engine_arguments(options, options.cases)
    longest = max(options.lengths) + NEW_TOKENS + 64
    arguments["context_length"] = max(arguments["context_length"], -(-longest // 1024) * 1024)
    # What the user asked for by --engine-arg stays on top.
    asked = {text.partition("=")[0] for text in options.engine_arg}
    return arguments | {key: value for key, value in PARTS.get(part, {}).items() if key not in asked}


def prompts_of(options) -> list[Prompt]:
    return [Prompt(STREAM + i, length) for i, length in enumerate(options.lengths)]


def alone(engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Greedy tokens of each prompt, sent when the one before is done: with DP attention every other rank idles."""
    engine.flush()
    return [engine.generate([prompt], NEW_TOKENS)["output_ids"][0] for prompt in prompts]


def together(engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    engine.flush()
    return engine.generate(list(prompts), NEW_TOKENS)["output_ids"]


def same(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    """Share of tokens that agree, each prompt up to its first difference."""
    return bench._same_tokens(left, right)


def compare_tokens(report: Report, one_gpu: dict, several: dict, *, where: str = "") -> None:
    """Judge the tokens of two ranks; arguments: engine name -> tokens of each prompt; ``where`` ends the checks' names.

    Ours must give stock's, as on one GPU: both work on the same shards. Against one GPU the reductions of two ranks round
    differently, which can move a token of a random model; there ours must agree as far as stock does.
    """
    share = same(several["stock"], several["ours"])
    report.judge(
        f"tokens equal stock's{where}", share == 1.0, f"{share:.2%} of the tokens agree, prompts one at a time"
    )
    stock, ours = (same(one_gpu[name], several[name]) for name in ("stock", "ours"))
    detail = f"{ours:.2%} of the tokens agree with one GPU's; stock's own: {stock:.2%}"
    report.judge(f"tokens equal one GPU's{where}", ours >= stock, detail)


def compare_unequal(report: Report, apart: dict, at_once: dict) -> None:
    """Judge prompts of unequal length sent at once; arguments: engine name -> tokens of each prompt."""
    stock, ours = (same(apart[name], at_once[name]) for name in ("stock", "ours"))
    detail = f"sent at once {ours:.2%} of the tokens are those of one at a time; stock's own: {stock:.2%}"
    report.judge("prompts of unequal length at once", ours >= stock, detail)


def probe_faults(found: dict) -> list[str]:
    """Where a rank's selections are not SGLang's, by the limits of tests/gpu/test_server.py."""
    faults = []
    for mode in ("source", "decode", "extend"):
        seen = found[mode]
        if not seen["rows"]:
            faults.append(f"{mode}: no row was compared")
        elif seen["short"] or seen["missed"] > 2e-2 or seen["overlap"] < 0.99 or seen["gap"] > 2e-2:
            faults.append(
                f"{mode}: " + ", ".join(f"{key} {seen[key]:g}" for key in ("overlap", "gap", "missed", "short"))
            )
    if found["source"]["blocks"] > 1e-2:
        faults.append(f"source: blocks {found['source']['blocks']:g}")
    return faults


def compare_ranks(report: Report, found: Sequence[dict | None], *, shared: Sequence[str]) -> None:
    """Judge the probe's report of each rank; in the modes of ``shared`` their selections must be equal."""
    silent = [rank for rank, one in enumerate(found) if one is None]
    if silent:
        report.check("selections", "failed", f"rank {', '.join(map(str, silent))} wrote no report")
        return
    for rank, one in enumerate(found):
        faults = probe_faults(one)
        rows = {mode: one[mode]["rows"] for mode in ("source", "decode", "extend")}
        detail = "; ".join(faults) or f"rows compared: {', '.join(f'{n} {mode}' for mode, n in rows.items())}"
        report.judge(f"selections of rank {rank} equal SGLang's", not faults, detail)
    if not shared:
        return
    first, *others = (
        {key: value for key, value in one["digests"].items() if key.split()[0] in shared} for one in found
    )
    differ = sorted(
        {key for other in others for key in first.keys() | other.keys() if first.get(key) != other.get(key)}
    )
    used = sum(value != 0 for value in first.values())
    detail = f"differ: {', '.join(differ)}" if differ else f"{used} layers and modes with selections, all steps equal"
    report.judge("ranks select the same", not differ and used > 0, detail)


def start_engine(name: str, arguments: dict, options, environment: dict) -> EngineProcess:
    log = options.log_dir / f"{name}.log"
    streams = bench.Streams(options.vocab_size)
    environment = {"DSV41_SPARSE_DISABLE": "0"} | environment
    engine = EngineProcess(name, arguments, streams, environment=environment, log=log)
    if not engine.connection.poll(START_SECONDS):
        engine.stop(gently=False)
        raise EngineError(f"the {name} engine was not up after {START_SECONDS} s; see {log}")
    return engine


@contextlib.contextmanager
def engine_pair(options, part: str | None):
    """Stock and ours of a part, both alive; their logs are named after it."""
    folder = options.log_dir / (part or "one-gpu")
    folder.mkdir(parents=True, exist_ok=True)
    own = copy.copy(options)
    own.log_dir = folder
    with bench.engine_pair(own, arguments_of(options, part)) as engines:
        yield dict(zip(("stock", "ours"), engines, strict=True))


def one_gpu_tokens(options) -> dict:
    """Engine name -> tokens of each prompt on one GPU; served once, whichever parts ask. Also writes the weights' shapes."""
    if options.one_gpu is None:
        with engine_pair(options, None) as engines:
            options.one_gpu = {name: alone(engine, prompts_of(options)) for name, engine in engines.items()}
    return options.one_gpu


def probed(options, part: str, report: Report) -> None:
    """Serve the prompts with the probe in every process, and judge what each rank wrote."""
    reports = options.log_dir / f"{part}.probe.{{rank}}.json"
    # It runs alone, and the probe's comparisons take memory of their own.
    arguments = arguments_of(options, part) | {"attention_backend": options.backends[1], "mem_fraction_static": 0.7}
    engine = start_engine(f"{part}-probed", arguments, options, {"DSV41_PROBE_OUT": str(reports)})
    gently = False
    try:
        engine.wait_ready()
        for i, length in enumerate(options.lengths):
            # One for each rank under DP attention.
            engine.generate([Prompt(STREAM + i, length), Prompt(STREAM + 50 + i, length)], NEW_TOKENS)
        # A report is written at the start of an extend.
        engine.generate([Prompt(STREAM + 90, 40), Prompt(STREAM + 91, 40)], 1)
        gently = True
    finally:
        engine.stop(gently=gently)
    paths = [Path(str(reports).replace("{rank}", str(rank))) for rank in range(NEEDED)]
    found = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    compare_ranks(report, found, shared=SHARED_WORK[part])


def captured_graphs(log: str) -> str | None:
    """The line of a server's log that says its decode graphs were captured, or None."""
    found = re.search(r"Capture target decode CUDA graph end\..*", log)
    return found and found.group(0)


def run_servers(part: str, options, report: Report) -> None:
    one_gpu = one_gpu_tokens(options)
    prompts = prompts_of(options)
    with engine_pair(options, part) as engines:
        apart = {name: alone(engine, prompts) for name, engine in engines.items()}
        compare_tokens(report, one_gpu, apart, where=", the other rank idle" if part == "dp" else "")
        compare_unequal(report, apart, {name: together(engine, prompts) for name, engine in engines.items()})
        line = captured_graphs(engines["ours"].log.read_text(errors="replace"))
        report.judge("decode graphs were captured", line is not None, line or f"not said in {engines['ours'].log}")
        for engine in engines.values():
            engine.flush()
        measuring = bench.Bench(
            engines["stock"],
            engines["ours"],
            chunk=options.chunked_prefill_size,
            capacity=options.max_total_tokens,
            rounds=options.rounds,
            say=report.say,
        )
        for reason in bench.measure(measuring, options.cases, report, time_left=options.time_left):
            report.check(reason.partition(":")[0], "not run", reason)
    probed(options, part, report)


def run_part(part: str, options, report: Report) -> None:
    report.part = part
    try:
        if part == "kernels":
            run_kernels(options, report)
        else:
            run_servers(part, options, report)
    except (EngineError, ValueError) as error:
        report.check("servers", "failed", str(error))


# ---- the command ----


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", action="append", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; may be repeated")
    add(
        "--quick",
        action="store_true",
        help="12 layers, shorter prompts, small cases and one round: does it work at all",
    )
    add("--cases", nargs="+", default=None, metavar="CASE", help=f"of tp, dp and cp (default: {', '.join(CASES)})")
    add(
        "--rounds",
        type=int,
        default=None,
        metavar="N",
        help="samples of each engine in a case (default: 3; 1 if quick)",
    )
    add("--out", type=Path, default=ROOT / "benchmarks/results/multi_gpu.json", metavar="FILE")
    add("--log-dir", type=Path, default=None, metavar="DIR", help="the servers' logs and reports (default: temporary)")
    add("--deadline", type=float, default=0, metavar="SECONDS", help="start no further case after this (0: none)")
    add("--mem-fraction-static", type=float, default=0.4, help="of each of two engines (default: %(default)s)")
    add("--max-total-tokens", type=int, default=1_572_864, help="cache tokens of an engine (default: %(default)s)")
    add("--chunked-prefill-size", type=int, default=8192, help="of all ranks together (default: %(default)s)")
    add("--sequential-start", action="store_true", help="start the two engines one after the other, not at once")
    add("--engine-arg", action="append", default=[], metavar="NAME=JSON", help="further argument of every engine")
    add("--commit", default=None, help="for the result file, where there is no git")
    options = parser.parse_args(argv)
    options.only = [part for part in PARTS if part in options.only] if options.only else list(PARTS)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.lengths = QUICK_LENGTHS if options.quick else LENGTHS
    options.preset = "tiny" if options.quick else "topology"
    try:
        options.cases = [Case.parse(text) for text in options.cases or (QUICK_CASES if options.quick else CASES)]
    except ValueError as error:
        parser.error(str(error))
    # A cached prompt is found again only on the rank that has it, and round robin deals an even batch alike each time.
    wrong = [case.name for case in options.cases if case.kind == "prefill_chunk" or case.batch % NEEDED]
    if wrong and "dp" in options.only:
        parser.error(f"case {wrong[0]!r} does not suit DP attention: give decode or prefill cases of an even batch")
    # What scripts/bench_server.py reads of its own options.
    options.backends, options.load_format, options.context_length = ("dsv4", "dsv41-sparse"), "dummy", None
    options.parallel_start, options.one_gpu = not options.sequential_start, None
    return options


def main(argv: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    options = parse_arguments(argv)
    gpus = visible_gpus()
    reason = too_few(gpus)
    if reason:
        print(f"multi_gpu: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run the clean-up below
    with tempfile.TemporaryDirectory(prefix="dsv41-multi-gpu-") as scratch:
        from sglang_dsv41.models import DEFAULT_VOCAB_SIZE, write_model

        options.vocab_size = DEFAULT_VOCAB_SIZE
        options.model = write_model(Path(scratch) / "model", options.preset)
        options.log_dir = options.log_dir or Path(scratch)
        options.log_dir.mkdir(parents=True, exist_ok=True)
        options.time_left = lambda: not options.deadline or time.monotonic() - start < options.deadline
        # Every server's processes load the test plugins: the weights always, the probe where DSV41_PROBE_OUT is set. A
        # spawned process takes sys.path from here, one that is started anew PYTHONPATH.
        sys.path.insert(0, str(PROBE))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROBE), str(ROOT), os.environ.get("PYTHONPATH")]))
        os.environ["DSV41_WEIGHTS_SHAPES"] = str(Path(scratch) / "shapes.json")
        results = ResultFile(
            options.out, "multi_gpu", argv=None if argv is None else [__file__, *argv], commit=options.commit
        )
        results.content["gpus"] = len(gpus)
        results.content["model"] = options.preset
        report = Report(results, say=lambda line: print(f"[{time.monotonic() - start:4.0f} s] {line}", flush=True))
        report.keep([part for part in PARTS if part not in options.only])
        for part in options.only:
            run_part(part, options, report)
    if results.rows:
        print(results.table(), flush=True)
    failed = report.failed()
    for name in failed:
        print(f"multi_gpu: failed or not run: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
