"""Measure decode and prefill of SGLang with the stock backend and with ours, sample by sample in turn.

examples:
  {program} --out server.json --log-dir logs
  {program} --quick                                # small cases, one round: does it work?
  {program} --cases 'decode 8x131072' --model DIR --load-format auto --vocab-size 129280

Both engines are alive on the one GPU, each in its own process, and take turns: one works at a time, round after
round. Cases:

  decode BxC       tokens/s of B requests at context C. The prompts are in the prefix cache; a sample is the
                   difference between generating {many} and {few} tokens, so that prefill and arrival drop out.
  prefill BxC      tokens/s of B prompts of C tokens, nothing cached, from the call to the last first token.
  ttft C           seconds to the first token of one prompt of C tokens, nothing cached.
  prefill_chunk C  tokens/s of one prefill chunk whose first token is at context C (at least one chunk). The
                   context before it is cached; a sample is the difference between two chunks and one.

The result file is written after every case. Where NVML answers, a row has each engine's `peak_mib`: the most GPU memory
that it has held until then, above that of its start. torch keeps what it once took, so to see what one case needs, run
it alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import machine
from .progress import Progress
from .results import ResultFile, command_line

PROGRAM = ("dsv41-sparse", "bench", "server")
OUT = Path("server.json")
DEFAULT_CASES = (
    "decode 8x2048",
    "prefill 8x131072",
    "decode 8x131072",
    "decode 2x131072",
    "decode 2x524288",
    "ttft 131072",
    "ttft 524288",
    "prefill_chunk 524288",
    "prefill_chunk 262144",
    "prefill_chunk 131072",
    "prefill_chunk 8192",
)
NEEDED = (
    "one CUDA GPU that SGLang serves DeepSeek-V4.1 on (H100, H200, H20 or newer), with memory for two engines "
    "(--mem-fraction-static, --max-total-tokens)"
)
QUICK_CASES = ("decode 8x2048", "prefill 2x32768", "decode 2x32768", "prefill_chunk 32768")
# The difference must outlast what arrival and the last prefill chunk scatter by, some 0.1 s.
FEW, MANY = 64, 1088
FIRST_TOKEN_ID = 16  # above every special token of the generated models
SEED = 20


class Prompt(NamedTuple):
    """The first `length` tokens of a random stream, then `tail_length` tokens of another."""

    stream: int
    length: int
    tail: int = 0
    tail_length: int = 0


@dataclass(frozen=True)
class Case:
    kind: str
    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Case:
        found = re.fullmatch(r"(decode|prefill) ([1-9]\d*)x([1-9]\d*)|(prefill_chunk|ttft) ([1-9]\d*)", text.strip())
        if found is None:
            raise ValueError(f"case {text!r} is none of 'decode BxC', 'prefill BxC', 'ttft C' and 'prefill_chunk C'")
        kind, batch, context, single_kind, single_context = found.groups()
        return cls(kind, int(batch), int(context)) if kind else cls(single_kind, 1, int(single_context))

    @property
    def name(self) -> str:
        return (
            f"{self.kind} {self.context}"
            if self.kind in ("prefill_chunk", "ttft")
            else f"{self.kind} {self.batch}x{self.context}"
        )

    def longest(self, chunk: int) -> int:
        """Tokens of its longest request."""
        return self.context + {"decode": MANY, "prefill": 1, "ttft": 1, "prefill_chunk": chunk + 1}[self.kind]

    def cache_tokens(self, chunk: int, rounds: int) -> int:
        """Tokens it leaves in the cache at most."""
        if self.kind == "prefill_chunk":
            return self.context + 3 * chunk * (rounds + 1)
        return self.batch * self.longest(chunk)


class EngineError(RuntimeError):
    """An engine died or refused a command: nothing more can be measured."""


class CaseError(RuntimeError):
    """A case could not be measured; the others can."""


class MemoryWatch:
    """What each engine has taken of one GPU since `start`, seen by polling the GPU while that engine alone works.

    Args:
        used: bytes of the GPU that are taken, by whomever.
    """

    def __init__(self, used: Callable[[], int], interval: float = 0.002):
        self.used, self.interval = used, interval
        self.held: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    @classmethod
    def of_first_gpu(cls) -> MemoryWatch | None:
        """None where NVML does not answer."""
        try:
            import pynvml

            pynvml.nvmlInit()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
            of_name = pynvml.nvmlDeviceGetHandleByIndex if visible.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
            handle = of_name(int(visible) if visible.isdigit() else visible)
            watch = cls(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            watch.used()
        except Exception:  # noqa: BLE001 (memory is a side note; no driver, no package, no permission: go on without)
            return None
        return watch

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Count what the GPU's memory grows by to the engine `name`."""
        before = highest = self.used()
        done = threading.Event()

        def poll() -> None:
            nonlocal highest
            while not done.wait(self.interval):
                highest = max(highest, self.used())

        poller = threading.Thread(target=poll, daemon=True)
        poller.start()
        try:
            yield
        finally:
            done.set()
            poller.join()
            after, held = self.used(), self.held.get(name, 0)
            self.peak[name] = max(self.peak.get(name, 0), held + max(highest, after) - before)
            self.held[name] = held + after - before

    def peak_mib(self, name: str) -> float:
        return round(self.peak.get(name, 0) / 2**20, 1)


class Bench:
    """Takes samples from engines in turn. An engine has `generate(prompts, max_new_tokens) -> dict` with `seconds`,
    `cached` (prompt tokens found in the cache, a request each) and `output_ids`, and `flush()`. `say` gets a line for each
    round, `at` what is being done; `memory` watches the GPU while one engine works."""

    def __init__(
        self,
        stock,
        ours,
        *,
        chunk: int,
        capacity: int,
        rounds: int,
        say: Callable[[str], None] = print,
        at: Callable[[str], None] = lambda what: None,
        memory: MemoryWatch | None = None,
    ):
        self.engines = {"stock": stock, "ours": ours}
        self.chunk = chunk
        self.capacity = capacity
        self.rounds = rounds
        self.say = say
        self.at = at
        self.memory = memory
        self.resident = 0
        self.tails = 0

    def run(self, case: Case) -> dict:
        """All samples of a case, as the keyword arguments of `ResultFile.add`."""
        self.at(f"{case.name}: prompts")
        self._make_room(case)
        prepare, sample = {
            "decode": (self._prepare_decode, self._sample_decode),
            "prefill": (self._prepare_prefill, self._sample_prefill),
            "ttft": (self._prepare_prefill, self._sample_first_token),
            "prefill_chunk": (self._prepare_chunk, self._sample_chunk),
        }[case.kind]
        unit = "s" if case.kind == "ttft" else "tok/s"
        extra = prepare(case)
        samples = {name: [] for name in self.engines}
        for round_ in range(self.rounds):
            # A tail is the same for both engines, so that they do the same work.
            self.tails += 2
            self.at(f"{case.name}: round {round_ + 1} of {self.rounds}")
            # Who goes first changes from round to round, in case it matters.
            for name, engine in list(self.engines.items())[:: -1 if round_ % 2 else 1]:
                with self._turn(name):
                    samples[name].append(sample(engine, case))
            self.say(
                f"{case.name} round {round_ + 1}: " + ", ".join(f"{n} {s[-1]:.5g} {unit}" for n, s in samples.items())
            )
        if self.memory:
            extra["peak_mib"] = {name: self.memory.peak_mib(name) for name in self.engines}
        return {"unit": unit, **samples, **extra}

    def _turn(self, name: str):
        return self.memory.turn(name) if self.memory else contextlib.nullcontext()

    def _make_room(self, case: Case) -> None:
        need = case.cache_tokens(self.chunk, self.rounds)
        if need > self.capacity:
            raise CaseError(f"case {case.name} needs {need} cache tokens, more than --max-total-tokens {self.capacity}")
        if self.resident + need > self.capacity:
            self._flush()
        self.resident += need

    def _flush(self) -> None:
        for engine in self.engines.values():
            engine.flush()
        self.resident = 0

    # Decode

    def _prepare_decode(self, case: Case) -> dict:
        """Fill the cache, warm up, and compare the tokens."""
        outputs = {}
        for name, engine in self.engines.items():
            with self._turn(name):
                engine.generate(self._prompts(case), 1)
                result = engine.generate(self._prompts(case), FEW)
            if min(result["cached"]) < case.context * 0.8:
                raise CaseError(f"{case.name}: {name} found {result['cached']} of {case.context} tokens in its cache")
            outputs[name] = result["output_ids"]
        return {"same_tokens": _same_tokens(outputs["stock"], outputs["ours"])}

    def _sample_decode(self, engine, case: Case) -> float:
        few, many = (engine.generate(self._prompts(case), count)["seconds"] for count in (FEW, MANY))
        return _rate(case.batch * (MANY - FEW), many - few, case)

    # Prefill

    def _prepare_prefill(self, case: Case) -> dict:
        for name, engine in self.engines.items():
            with self._turn(name):
                engine.generate([Prompt(case.batch + 1, min(case.context, 2 * self.chunk))], 1)
        return {}

    def _sample_prefill(self, engine, case: Case) -> float:
        return _rate(case.batch * case.context, self._sample_first_token(engine, case), case)

    def _sample_first_token(self, engine, case: Case) -> float:
        engine.flush()
        result = engine.generate(self._prompts(case), 1)
        if any(result["cached"]):
            raise CaseError(f"{case.name}: prompts were found in the cache after a flush: {result['cached']}")
        self.resident = case.cache_tokens(self.chunk, self.rounds)
        return result["seconds"]

    # Prefill chunk

    def _prepare_chunk(self, case: Case) -> dict:
        """Fill the cache up to one chunk before the context and check that a longer prompt finds it."""
        if case.context < self.chunk:
            raise CaseError(f"{case.name}: the context is smaller than one prefill chunk ({self.chunk})")
        # From an empty cache: what other cases left of the stream ends elsewhere, and only an end keeps its window.
        self._flush()
        self.resident = case.cache_tokens(self.chunk, self.rounds)
        base = case.context - self.chunk
        self.tails += 2
        for name, engine in self.engines.items():
            with self._turn(name):
                if base:
                    engine.generate([Prompt(0, base)], 1)
                cached = engine.generate([Prompt(0, base, self.tails + 1, 2 * self.chunk)], 1)["cached"]
            if cached[0] < base * 0.98:
                raise CaseError(f"{case.name}: {name} found {cached[0]} of {base} tokens in the prefix cache")
        return {}

    def _sample_chunk(self, engine, case: Case) -> float:
        base = case.context - self.chunk
        one = engine.generate([Prompt(0, base, self.tails, self.chunk)], 1)["seconds"]
        two = engine.generate([Prompt(0, base, self.tails + 1, 2 * self.chunk)], 1)["seconds"]
        return _rate(self.chunk, two - one, case)

    @staticmethod
    def _prompts(case: Case) -> list[Prompt]:
        return [Prompt(stream, case.context) for stream in range(case.batch)]


def _rate(tokens: int, seconds: float, case: Case) -> float:
    if seconds <= 0:
        raise CaseError(
            f"{case.name}: a difference of {seconds:.4f} s is noise; the case is too small for this machine"
        )
    return tokens / seconds


def _same_tokens(stock: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> float:
    """Share of greedy output tokens that agree, counted up to each request's first difference."""
    total = sum(len(tokens) for tokens in stock)
    same = 0
    for left, right in zip(stock, ours):
        differ = [a != b for a, b in zip(left, right)]
        same += differ.index(True) if True in differ else len(differ)
    return round(same / total, 4) if total else 0.0


# The engine processes


class Streams:
    """Random token streams by number, the same in every process, each extended as far as asked for."""

    def __init__(self, vocab_size: int, seed: int = SEED):
        self.ids = range(FIRST_TOKEN_ID, vocab_size)
        self.seed = seed
        self.known: dict[str, tuple[random.Random, list[int]]] = {}

    def take(self, name: str, length: int) -> list[int]:
        rng, tokens = self.known.setdefault(name, (random.Random(f"{self.seed} {name}"), []))
        if len(tokens) < length:
            tokens += rng.choices(self.ids, k=length - len(tokens))
        return tokens[:length]

    def prompt(self, prompt: Prompt) -> list[int]:
        tokens = self.take(f"stream {prompt.stream}", prompt.length)
        return tokens + self.take(f"tail {prompt.tail}", prompt.tail_length) if prompt.tail_length else tokens


def serve_engine(connection, arguments: dict, streams: Streams, environment: dict, log: str) -> None:
    """Body of an engine process: start an engine, then answer commands until "stop" or a closed pipe."""
    os.setsid()  # so that the parent can end this process and the engine's own processes together
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    engine = None
    try:
        import sglang

        start = time.perf_counter()
        engine = sglang.Engine(**arguments)
        connection.send({"ready": time.perf_counter() - start})
        while True:
            command = connection.recv()
            if command == "stop":
                break
            if command == "flush":
                engine.flush_cache()
                connection.send({})
                continue
            prompts, count = command
            connection.send(_generate(engine, [streams.prompt(prompt) for prompt in prompts], count))
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001 (the parent must learn of any failure)
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            connection.send({"error": f"{type(error).__name__}: {error}"})
    finally:
        if engine is not None:
            engine.shutdown()


def _generate(engine, input_ids: list[list[int]], count: int) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    start = time.perf_counter()
    outputs = engine.generate(input_ids=input_ids, sampling_params=sampling)
    seconds = time.perf_counter() - start
    short = [output["meta_info"]["completion_tokens"] for output in outputs]
    if any(tokens != count for tokens in short):
        raise RuntimeError(f"asked for {count} tokens a request, got {short}")
    return {
        "seconds": seconds,
        "cached": [output["meta_info"].get("cached_tokens", 0) for output in outputs],
        "output_ids": [list(output["output_ids"])[-count:] for output in outputs],
    }


class EngineProcess:
    """An engine in a process of its own, driven over a pipe."""

    def __init__(self, name: str, arguments: dict, streams: Streams, *, environment: dict, log: Path):
        self.name = name
        self.log = log
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve_engine, args=(theirs, arguments, streams, environment, str(log)))
        self.process.start()
        theirs.close()

    def wait_ready(self) -> float:
        """Seconds the engine's start took."""
        return self._receive()["ready"]

    def generate(self, prompts: list[Prompt], max_new_tokens: int) -> dict:
        self._send((prompts, max_new_tokens))
        return self._receive()

    def flush(self) -> None:
        self._send("flush")
        self._receive()

    def stop(self, *, gently: bool) -> None:
        if gently and self.process.is_alive():
            with contextlib.suppress(OSError):
                self.connection.send("stop")
            self.process.join(20)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join(20)

    def _send(self, command) -> None:
        try:
            self.connection.send(command)
        except OSError:
            self._fail("died")

    def _receive(self) -> dict:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self._fail("died")
        if "error" in answer:
            self._fail(answer["error"])
        return answer

    def _fail(self, what: str):
        lines = self.log.read_text(errors="replace").splitlines()[-40:] if self.log.exists() else []
        raise EngineError("\n".join([f"the {self.name} engine: {what}; the end of {self.log}:", *lines]))


def _say(line: str) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def engine_pair(
    options, arguments: dict, say: Callable[[str], None] = _say
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Both engines, started one after the other (or at once) and ended whatever happens."""
    streams = Streams(options.vocab_size)
    started: list[EngineProcess] = []
    gently = False
    try:
        for name, backend in zip(("stock", "ours"), options.backends):
            environment = {"DSV41_SPARSE_DISABLE": "1" if name == "stock" else "0"}
            log = options.log_dir / f"{name}.log"
            engine_arguments = arguments | {"attention_backend": backend}
            started.append(EngineProcess(name, engine_arguments, streams, environment=environment, log=log))
            if not options.parallel_start:
                say(f"{name} ({backend}) is up after {started[-1].wait_ready():.0f} s")
        if options.parallel_start:
            for engine in started:
                say(f"{engine.name} is up after {engine.wait_ready():.0f} s")
        yield started[0], started[1]
        gently = True
    finally:
        for engine in started:
            engine.stop(gently=gently)


def engine_arguments(options, cases: Sequence[Case]) -> dict:
    """What both engines are started with; only the attention backend differs."""
    longest = max(case.longest(options.chunked_prefill_size) for case in cases)
    arguments = {
        "model_path": str(options.model),
        "load_format": options.load_format,
        "skip_tokenizer_init": True,
        "random_seed": 1,
        "context_length": options.context_length or -(-(longest + 64) // 1024) * 1024,
        "mem_fraction_static": options.mem_fraction_static,
        "max_total_tokens": options.max_total_tokens,
        "chunked_prefill_size": options.chunked_prefill_size,
        "cuda_graph_max_bs_decode": max(8, max(case.batch for case in cases)),
        "disable_flashinfer_autotune": True,
        "log_level": "info",
    }
    for text in options.engine_arg:
        key, found, value = text.partition("=")
        if not found:
            raise ValueError(f"--engine-arg {text!r} is not NAME=JSON")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = value
    return arguments


def parse_arguments(
    argv: Sequence[str] | None = None, program: Sequence[str] = PROGRAM, out: Path = OUT
) -> argparse.Namespace:
    command = command_line(program)
    parser = argparse.ArgumentParser(
        prog=command,
        description=__doc__.format(program=command, few=FEW, many=MANY),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model", type=Path, metavar="DIR", help="model folder (default: the tiny random model, in a temporary folder)"
    )
    add("--load-format", default="dummy", help='"auto" for a real checkpoint (default: %(default)s)')
    add("--vocab-size", type=int, default=None, metavar="N", help="draw token ids below N (default: the tiny model's)")
    add("--cases", nargs="+", default=None, metavar="CASE", help=f"default: {', '.join(DEFAULT_CASES)}")
    add(
        "--rounds",
        type=int,
        default=None,
        metavar="N",
        help="samples of each engine in a case (default: 3; 1 if quick)",
    )
    add("--quick", action="store_true", help="small contexts and one round, to see that it works")
    add("--out", type=Path, default=out, metavar="FILE", help="result file (default: %(default)s)")
    add(
        "--log-dir", type=Path, default=None, metavar="DIR", help="where stock.log and ours.log go (default: temporary)"
    )
    add("--deadline", type=float, default=0, metavar="SECONDS", help="start no further case after this (0: none)")
    add("--mem-fraction-static", type=float, default=0.4, help="of each engine (default: %(default)s)")
    add("--max-total-tokens", type=int, default=1_572_864, help="cache tokens of each engine (default: %(default)s)")
    add("--chunked-prefill-size", type=int, default=8192, help="default: %(default)s")
    add("--context-length", type=int, default=None, help="default: what the longest case needs")
    add("--parallel-start", action="store_true", help="start both engines at once; their first compiles then compete")
    add("--backends", nargs=2, default=("dsv4", "dsv41-sparse"), metavar=("STOCK", "OURS"))
    add("--engine-arg", action="append", default=[], metavar="NAME=JSON", help="further argument of both engines")
    add("--commit", default=None, help="for the result file, where there is no git")
    add("--no-progress", action="store_true", help="no progress bar; there is none either where stderr is no terminal")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (1 if options.quick else 3)
    try:
        options.cases = [
            Case.parse(text) for text in options.cases or (QUICK_CASES if options.quick else DEFAULT_CASES)
        ]
    except ValueError as error:
        parser.error(str(error))
    return options


def measure(
    bench: Bench,
    cases: Sequence[Case],
    results: ResultFile,
    *,
    time_left: Callable[[], bool],
    done: Callable[[], None] = lambda: None,
) -> list[str]:
    """Run the cases, writing each to the result file; returns why any is missing there. ``done`` is called after each."""
    missing = []
    for case in cases:
        if not time_left():
            missing.append(f"{case.name}: the deadline had passed")
            continue
        try:
            row = bench.run(case)
        except CaseError as error:
            bench.say(str(error))
            missing.append(str(error))
        else:
            results.add(case.name, row.pop("unit"), **row)
        done()
    return missing


def main(argv: Sequence[str] | None = None, *, program: Sequence[str] = PROGRAM, out: Path = OUT) -> int:
    """``dsv41-sparse bench server``; 1 when a case was not measured, 2 when nothing can be measured here. ``program`` is
    how it was called, ``out`` the default result file."""
    start = time.monotonic()
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parse_arguments(argv, program, out)
    command = command_line(program)
    try:
        arguments = engine_arguments(options, options.cases)
        if arguments.get("device", "cuda") == "cuda":
            machine.require_gpu(NEEDED)
        machine.require_sglang()
    except (ValueError, machine.MachineError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run the clean-up below
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsv41-bench-")))
        from ..models import DEFAULT_VOCAB_SIZE, write_model

        options.vocab_size = options.vocab_size or DEFAULT_VOCAB_SIZE
        if options.model is None:
            arguments["model_path"] = str(write_model(scratch / "tiny"))
        options.log_dir = options.log_dir or scratch
        options.log_dir.mkdir(parents=True, exist_ok=True)
        results = ResultFile(options.out, "server", argv=[*program, *argv], commit=options.commit)
        missing = []
        try:
            with Progress(len(options.cases), show=not options.no_progress) as progress:

                def say(line: str) -> None:
                    progress.say(f"[{time.monotonic() - start:4.0f} s] {line}")

                progress.at("starting two engines")
                stock, ours = stack.enter_context(engine_pair(options, arguments, say))
                bench = Bench(
                    stock,
                    ours,
                    chunk=options.chunked_prefill_size,
                    capacity=options.max_total_tokens,
                    rounds=options.rounds,
                    say=say,
                    at=progress.at,
                    memory=MemoryWatch.of_first_gpu(),
                )

                def time_left() -> bool:
                    return not options.deadline or time.monotonic() - start < options.deadline

                missing = measure(bench, options.cases, results, time_left=time_left, done=progress.done)
        except EngineError as error:
            print(f"{command}: {error}", file=sys.stderr)
            return 1
        finally:
            if results.rows:
                print(results.table(), flush=True)
        for reason in missing:
            print(f"{command}: not measured: {reason}", file=sys.stderr)
    return 1 if missing else 0
