"""``dsv41-sparse try``: the main job in one command.

With a GPU the small random-weight model is served through ``dsv41-sparse`` and then through SGLang's own backend, one
text request each. Without one, the same indexer runs on torch over a batch of the released model's shape, and each
consumer's selection is compared with a dense selection over the whole context.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .plugin import NAME, STOCK

NEEDS_SGLANG = "SGLang is not installed here; pip install 'sglang>=0.5.23,<0.5.24'"

# The batch without a GPU: shorter than the top-k, shorter than the candidates, and two that are longer.
CONTEXTS = (300, 10_000, 32_768, 131_072)
# Triton's interpreter takes milliseconds a program, so its batch is smaller.
INTERPRETED_CONTEXTS = (300, 2048, 18_000)
KV_PAGE = 256  # SGLang's page, tokens
INDEX_PAGE = 64  # index-K positions a page, as on Hopper

# The request with a GPU: enough tokens for more positions than the candidates hold.
PROMPT_TOKENS = 20_000
CONTEXT_LENGTH = 32_768
FEW, MANY = 16, 144
ENGINE_SECONDS = 540

Say = Callable[[str], None]


class TrialError(RuntimeError):
    """The trial could not be run, or its result is wrong; the message is for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """``dsv41-sparse try``; 0 when the selections (without a GPU) or the served tokens (with one) are as they must be."""
    parser = argparse.ArgumentParser(
        prog="dsv41-sparse try",
        description="With a GPU: serve the small random-weight model through dsv41-sparse, answer one text request, and "
        "do the same with SGLang's own backend. Without one: run the same indexer code on torch over a batch of the "
        "released model's shape, check it against dense selection, and print what it saved.",
    )
    parser.add_argument("--cpu", action="store_true", help="run without a GPU even where there is one")
    parser.add_argument(
        "--contexts", type=int, nargs="+", metavar="N", help="without a GPU: context of each row of the batch"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="with a GPU: keep the model and the logs in this folder"
    )
    args = parser.parse_args(argv)
    try:
        if args.contexts and min(args.contexts) < 1:
            raise TrialError(f"--contexts must be positive, got {min(args.contexts)}")
        if not sglang_installed():
            raise TrialError(NEEDS_SGLANG)
        if args.cpu or not has_gpu():
            return try_cpu(args.contexts)
        with contextlib.ExitStack() as stack:
            folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsv41-try-")))
            return try_gpu(folder)
    except TrialError as error:
        print(f"dsv41-sparse try: {error}", file=sys.stderr)
        return 1


def sglang_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("sglang") is not None


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None


def progress() -> Say:
    """A printer of steps, each with the seconds since the first."""
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:5.1f} s] {text}", flush=True)

    return say


# ---- without a GPU ----


@dataclasses.dataclass(frozen=True)
class RowReport:
    """One row of the batch, over all consumer layers.

    Attributes:
        context: visible positions.
        dense: positions that a dense consumer scores.
        sparse: positions that ours scores.
        overlap: share of the dense picks that ours picked too, the smallest of the layers.
        different: picks that differ, all of them ties at the cut, summed over the layers.
    """

    context: int
    dense: int
    sparse: int
    overlap: float
    different: int

    @property
    def factor(self) -> float:
        return self.dense / self.sparse


def try_cpu(contexts: Sequence[int] | None = None) -> int:
    """Run the indexer over a decode batch with one row a context, and print what each row saved."""
    say = progress()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kernels = os.environ.get("DSV41_SPARSE_KERNELS") or ("portable" if interpreted else "reference")
    if kernels not in ("reference", "portable") or (kernels == "portable" and not interpreted):
        raise TrialError(
            f"kernel set {kernels!r} cannot run without a GPU; unset DSV41_SPARSE_KERNELS, or set TRITON_INTERPRET=1 to "
            "run the portable Triton kernels under their interpreter"
        )
    contexts = list(contexts or (INTERPRETED_CONTEXTS if kernels == "portable" else CONTEXTS))
    say("no GPU is used: running the indexer alone; importing SGLang's input classes")
    # SGLang's modules say at length that they miss a GPU.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        from . import indexer  # noqa: F401
    geometry = released_geometry()
    say(f"{geometry.describe()}")
    reports = compare(geometry, contexts, kernels=kernels, say=say)
    consumers = len(geometry.consumer_layers)
    print()
    print(f"Positions scored by the {consumers} consumer layers, kernel set {kernels}:")
    print(f"{'context':>10} {'dense':>12} {'ours':>12} {'fewer by':>9} {'same picks':>11} {'ties at cut':>12}")
    for row in reports:
        print(
            f"{row.context:>10,} {row.dense:>12,} {row.sparse:>12,} {row.factor:>8.1f}x {row.overlap:>10.2%} "
            f"{row.different:>12,}"
        )
    print(
        "\nEach selection equals the dense one over the same candidate blocks; equal scores at the cut are a free choice.\n"
        "same picks: the share that both ways picked, the lowest of the layers; ties at cut: picks that differ, all of them\n"
        "equal in score.\n"
        "The source layer still scores the whole context once a step. Queries and keys are random: this shows the work\n"
        "saved, not a speed. With a GPU the same command serves a small model."
    )
    return 0


def released_geometry() -> Any:
    """The candidate geometry of the preset with the released topology."""
    from . import models
    from .geometry import CandidateGeometry

    return CandidateGeometry.from_config(SimpleNamespace(**models.model_config("topology")["text_config"]))


def compare(
    geometry: Any, contexts: Sequence[int], *, kernels: str = "reference", say: Say = print, seed: int = 0
) -> list[RowReport]:
    """One decode step, a row a context: the source publishes, each consumer selects, each selection is checked.

    Raises:
        TrialError: a selection differs from the dense one by more than ties at the cut.
    """
    import torch

    from .indexer import SparseCandidateIndexer
    from .kernels import kernel_set_class
    from .rows import RowBuffers

    step = _Step(geometry, contexts, seed)
    buffers = RowBuffers(
        geometry,
        max_rows=len(contexts),
        scratch_bytes=64 << 20,
        max_context=step.page_table.shape[1] * KV_PAGE,
        dense_rows=len(contexts),
        device="cpu",
    )
    kernel_set = kernel_set_class(kernels)(geometry, buffers)
    indexer = SparseCandidateIndexer(
        geometry=geometry,
        kernels=kernel_set,
        buffers=buffers,
        token_to_kv_pool=step.pool,
        page_size=KV_PAGE,
        # Only an extend asks SGLang's own indexers.
        prefill_source=None,
        full_topk=None,
    )

    say(f"layer {geometry.source_layer} (source): scores {sum(contexts):,} positions and publishes its best blocks")
    inputs = step.inputs(geometry.source_layer)
    schedule = indexer.publish_decode(inputs)
    rows, keys = schedule.rows, step.keys
    logits = _dense_logits(kernel_set, kernel_set.project(inputs), keys, rows)
    candidates = [_positions(rows, row, geometry) for row in range(len(contexts))]
    for row in range(len(contexts)):
        _check_blocks(logits[row], candidates[row], geometry, row)
        _check_picks(inputs.out_page_indices[row], logits[row], None, rows, row, geometry)

    sparse = rows.end.tolist()
    overlap, different = [1.0] * len(contexts), [0] * len(contexts)
    for layer in geometry.consumer_layers:
        inputs = step.inputs(layer)
        indexer.consume_decode(inputs, schedule)
        logits = _dense_logits(kernel_set, kernel_set.project(inputs), keys, rows)
        for row in range(len(contexts)):
            shared, ties = _check_picks(
                inputs.out_page_indices[row], logits[row], candidates[row], rows, row, geometry, layer
            )
            overlap[row] = min(overlap[row], shared)
            different[row] += ties
        say(f"layer {layer} (consumer): scored {sum(sparse):,} positions instead of {sum(contexts):,}; checked")
    if not torch.equal(rows.end, torch.tensor([len(c) for c in candidates], dtype=torch.int32)):
        raise TrialError(f"the schedule counts {sparse} valid columns, its blocks hold {[len(c) for c in candidates]}")
    layers = len(geometry.consumer_layers)
    return [
        RowReport(context, context * layers, sparse[row] * layers, overlap[row], different[row])
        for row, context in enumerate(contexts)
    ]


class _Step:
    """A decode step in SGLang's own input class: random keys in a pool, random queries a layer."""

    def __init__(self, geometry: Any, contexts: Sequence[int], seed: int) -> None:
        import torch

        from .kernels import PagedKeys

        self.geometry = geometry
        self.contexts = torch.tensor(contexts, dtype=torch.int64)
        self.generator = torch.Generator().manual_seed(seed)
        width = max(-(-context // KV_PAGE) for context in contexts)
        pages = len(contexts) * width
        # Shuffled, so that a request's pages lie apart; page 0 is SGLang's padding page.
        order = torch.randperm(pages, generator=self.generator) + 1
        self.page_table = order.view(len(contexts), width).to(torch.int32)
        index_pages = (pages + 1) * (KV_PAGE // INDEX_PAGE)
        buffer = torch.randint(0, 256, (index_pages, INDEX_PAGE * 68), dtype=torch.uint8, generator=self.generator)
        exponents = torch.randint(120, 131, (index_pages, INDEX_PAGE * 4), generator=self.generator)
        buffer[:, INDEX_PAGE * 64 :] = exponents.to(torch.uint8)
        self.keys = PagedKeys(pool=buffer, page_slots=INDEX_PAGE)
        self.pool = SimpleNamespace(
            get_index_k_with_scale_buffer=lambda layer: buffer, get_index_k_page_size=lambda ratio: INDEX_PAGE
        )
        self.metadata = self._metadata()

    def _metadata(self) -> Any:
        from sglang.srt.environ import envs as sglang_envs
        from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

        # Without a GPU there is no DeepGEMM plan to make.
        with sglang_envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.override(True):
            return PagedIndexerMetadata(
                page_size=KV_PAGE,
                compressed_page_size=KV_PAGE,
                page_table=self.page_table,
                compressed_seq_lens=self.contexts.to(dtype=self.page_table.dtype),
                use_topk_v2=False,
                compress_ratio=1,
            )

    def inputs(self, layer: int) -> Any:
        """The step's inputs of one index layer, with projections of its own."""
        import torch
        from sglang.srt.layers.attention.dsv4.v41_indexer.types import DecodeInputs

        from .kernels.reference import E2M1_VALUES

        rows, heads, dim = len(self.contexts), self.geometry.heads, self.geometry.head_dim
        codes = torch.randint(0, 16, (rows, heads, dim), generator=self.generator)
        # Queries as SGLang rounds them: on the MXFP4 grid.
        queries = torch.tensor(E2M1_VALUES)[codes].to(torch.bfloat16)
        weights = (torch.randn(rows, heads, generator=self.generator) * (dim * heads) ** -0.5).to(torch.bfloat16)
        return DecodeInputs(
            indexer=SimpleNamespace(queries=lambda *_: queries, head_weights=lambda *_: weights),
            layer_id=layer,
            compress_ratio=1,
            freqs_cis=None,
            x=None,
            q_lora=None,
            positions=self.contexts - 1,
            req_rows=torch.arange(rows),
            paged_metadata=self.metadata,
            is_verify=False,
            out_page_indices=torch.full((rows, self.geometry.topk), -7, dtype=torch.int32),
        )


def _dense_logits(kernels: Any, queries: Any, keys: Any, rows: Any) -> list[Any]:
    """Each row's logits over all its visible positions."""
    lens, logits = rows.lens.tolist(), []
    for tile, scores in kernels.dense_logits_tiles(queries, keys, rows):
        for offset, row in enumerate(range(tile.start, tile.stop)):
            logits.append(scores[offset, : lens[row]].float().clone())
    return logits


def _positions(rows: Any, row: int, geometry: Any) -> Any:
    """The visible positions of a row's published blocks, ascending."""
    import torch

    blocks = rows.sparse_indices[row].to(torch.int64)
    blocks = blocks[blocks < torch.iinfo(torch.int32).max]
    positions = (blocks[:, None] * geometry.kernel_block + torch.arange(geometry.kernel_block)).flatten()
    return positions[positions < rows.lens[row]]


def _check_blocks(scores: Any, candidates: Any, geometry: Any, row: int) -> None:
    """The newest block and the best of the others, by their largest score, are the candidates."""
    import torch

    size, length = geometry.block_size, scores.shape[0]
    count = -(-length // size)
    padded = torch.full((count * size,), -torch.inf)
    padded[:length] = scores
    best = padded.view(count, size).amax(1)
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[candidates // size] = True
    others = chosen.clone()
    others[-1] = False
    if not chosen[-1] or chosen.sum() != min(count, geometry.topk_blocks):
        raise TrialError(f"row {row}: {int(chosen.sum())} blocks published of {count}, newest among them: {chosen[-1]}")
    if others.any() and not chosen.all() and best[~chosen].max() > best[others].min():
        raise TrialError(f"row {row}: a block was left out that scores higher than a published one")


def _check_picks(
    slots: Any, scores: Any, allowed: Any, rows: Any, row: int, geometry: Any, layer: int | None = None
) -> tuple[float, int]:
    """(share of the dense picks that were picked, picks that differ) of one row; the difference is ties at the cut.

    Args:
        slots: [top-k] picks as pool slots, -1 padded.
        scores: the row's dense scores over its visible positions.
        allowed: positions to choose among, None for all.

    Raises:
        TrialError: the picks are no top-k of ``scores``.
    """
    import torch

    positions = torch.arange(scores.shape[0]) if allowed is None else allowed
    table = rows.block_table[row].to(torch.int64)
    slot_of = table[positions // rows.table_slots] * rows.table_slots + positions % rows.table_slots
    picked = torch.isin(slot_of, slots[slots >= 0].to(torch.int64))
    count = min(geometry.topk, positions.shape[0])
    where = f"row {row}, layer {geometry.source_layer if layer is None else layer}"
    if int(picked.sum()) != count or int((slots >= 0).sum()) != count:
        raise TrialError(f"{where}: {int((slots >= 0).sum())} picks, {int(picked.sum())} of them visible; not {count}")
    visible = scores[positions]
    best = visible.topk(count)
    cut = best.values[-1]
    wrong = (picked & (visible < cut)) | (~picked & (visible > cut))
    if wrong.any():
        raise TrialError(f"{where}: {int(wrong.sum())} picks differ from the dense selection, and not by a tie")
    shared = int(picked[best.indices].sum())
    return shared / count, count - shared


# ---- with a GPU ----


def try_gpu(folder: Path) -> int:
    """Serve the small model through our backend, then through SGLang's, one text request each."""
    from . import models

    say = progress()
    model = models.write_model(folder / "model")
    say(f"wrote the small random-weight model to {model}; its answers are noise, only their equality means something")
    results = {}
    for backend in (NAME, STOCK):
        say(f"starting SGLang with --attention-backend {backend} (one to two minutes; log: {folder / backend}.log)")
        results[backend] = _serve(backend, model, folder)
        say(f"{backend}: {results[backend]['tokens_per_second']:.0f} tokens/s of one request, {FEW} tokens shown below")
    log = (folder / f"{NAME}.log").read_text(encoding="utf-8", errors="replace")
    kernels = kernel_set_in(log)
    ours, stock = results[NAME], results[STOCK]
    equal = ours["output_ids"] == stock["output_ids"]
    print()
    print(f"prompt:        {ours['prompt_tokens']:,} tokens of text")
    for backend, result in results.items():
        print(f"{backend + ':':<14} {result['output_ids']}")
    print(f"text:          {ours['text']!r}")
    print(f"equal:         {'yes' if equal else 'no'}")
    print(f"kernel set:    {kernels}")
    for backend, result in results.items():
        print(
            f"{backend + ':':<14} {result['tokens_per_second']:.0f} tokens/s, first token {result['first_seconds']:.2f} s"
        )
    print("One request of a small model is no benchmark; scripts/bench_server.py measures.")
    if not equal:
        print(
            "The tokens differ. A tie at the top-k cut can do that on random weights; if it comes back, please report it "
            "with the log.",
            file=sys.stderr,
        )
    return 0 if equal else 1


def kernel_set_in(log: str) -> str:
    """The kernel set that a server's log names.

    Raises:
        TrialError: the server did not run our backend.
    """
    found = re.search(r"dsv41-sparse: .*Kernels: (\w+)", log)
    if found is None:
        raise TrialError(f"the server's log does not say that {NAME} ran; the end of it:\n{log[-3000:]}")
    return found.group(1)


def prompt_text(tokenizer: Any, tokens: int, seed: int = 1) -> str:
    """Text of about ``tokens`` tokens, without repetition that a prompt of one sentence would have."""
    rng = random.Random(seed)
    letters = "etaoinshrdlu"
    words: list[str] = []
    length = 0
    while length < tokens:
        more = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(500)]
        words += more
        length += len(tokenizer.encode(" " + " ".join(more)))
    return " ".join(words)


def _serve(backend: str, model: Path, folder: Path) -> dict:
    """Run the engine in a process of its own, whose memory is free for the next one when it ends."""
    out, log = folder / f"{backend}.json", folder / f"{backend}.log"
    command = [sys.executable, "-m", __name__, backend, str(model), str(out)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: Any = process.wait(ENGINE_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"nothing after {ENGINE_SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0 or not out.exists():
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
        raise TrialError(
            f"SGLang with {backend} ended with {status}; `dsv41-sparse doctor --model-path MODEL` may say why. The end "
            f"of its log:\n{tail}"
        )
    return json.loads(out.read_text(encoding="utf-8"))


def _engine_process(backend: str, model: str, out: str) -> None:
    """Body of the engine's process: one text request, then the decode speed."""
    import sglang
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = prompt_text(tokenizer, PROMPT_TOKENS)
    engine = sglang.Engine(
        model_path=model,
        load_format="dummy",
        attention_backend=backend,
        context_length=CONTEXT_LENGTH,
        mem_fraction_static=0.8,
        cuda_graph_max_bs_decode=2,
        disable_flashinfer_autotune=True,
        random_seed=1,
    )

    def generate(count: int) -> tuple[float, dict]:
        start = time.perf_counter()
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        answer = engine.generate(prompt=prompt, sampling_params=sampling)
        return time.perf_counter() - start, answer

    first, answer = generate(1)
    # The prompt is cached from here on, so the difference between two lengths is decode alone.
    generate(MANY)
    few, answer = generate(FEW)
    many, _ = generate(MANY)
    result = {
        "prompt_tokens": answer["meta_info"]["prompt_tokens"],
        "output_ids": list(answer["output_ids"])[-FEW:],
        "text": answer["text"],
        "first_seconds": first,
        "tokens_per_second": (MANY - FEW) / (many - few),
    }
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    engine.shutdown()


if __name__ == "__main__":
    _engine_process(*sys.argv[1:])
