"""The SGLang names and signatures that this release stands on, as data, and the check of them.

The check reads SGLang's source text and imports none of it, so the modules that need a GPU library are covered too and
the whole table costs a few dozen milliseconds in each process.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The SGLang releases that the table was checked against.
SUPPORTED = ">=0.5.23,<0.5.24"

Kind = Literal["attribute", "signature", "fields", "instance", "literal"]


@dataclass(frozen=True)
class Seam:
    """One thing of SGLang that we rely on.

    Attributes:
        module: SGLang module that defines it.
        name: dotted name inside the module.
        kind: what ``expected`` lists: nothing (``attribute``: the name is bound), parameters in order (``signature``:
            any further one has a default), names bound in a class body (``fields``), attributes that ``__init__`` sets
            (``instance``), or string constants in the body (``literal``).
        expected: see ``kind``; a parameter that we pass by keyword and that SGLang demands so is written ``*name``.
        why: what we use it for.
    """

    module: str
    name: str
    kind: Kind
    expected: tuple[str, ...]
    why: str

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Mismatch:
    """A seam that SGLang does not have in the expected form."""

    seam: str
    expected: str
    found: str
    why: str = ""

    def __str__(self) -> str:
        why = f" (needed to {self.why})" if self.why else ""
        return f"{self.seam}: expected {self.expected}, found {self.found}{why}"


_ARGS = "sglang.srt.arg_groups"
_ATTENTION = "sglang.srt.layers.attention"
_V4 = f"{_ATTENTION}.deepseek_v4_backend"
_TRTLLM = f"{_ATTENTION}.deepseek_v4_trtllm_backend"
_INDEXER = f"{_ATTENTION}.dsv4.v41_indexer"
_OPS = "sglang.kernels.ops.attention"
_POOL = "DeepSeekV4TokenToKVPool"
_EXECUTOR = "sglang.srt.model_executor"
_SETUP = f"{_EXECUTOR}.model_runner_components.attention_backend_setup"
_SHORT = "capture decode graphs for short contexts"
_METRICS = "name and label the series of --enable-metrics"
_COUNT = "count the rows of decode and verify steps"
_PREFILL_GRAPH = "keep index layers in a prefill graph on SM100"

SEAMS: tuple[Seam, ...] = (
    # Plugin.
    Seam("sglang.srt.plugins", "load_plugins", "signature", (), "load plugins before a benchmark program"),
    Seam(f"{_ARGS}.choices", "ATTENTION_BACKEND_CHOICES", "attribute", (), "see whether the name is a choice already"),
    Seam(f"{_ARGS}.choices", "add_attention_backend_choices", "attribute", (), "accept the name on the command line"),
    Seam(
        f"{_ATTENTION}.attention_registry", "register_attention_backend", "signature", ("name",), "register the backend"
    ),
    Seam(f"{_ATTENTION}.attention_registry", "ATTENTION_BACKENDS", "attribute", (), "be found by the model runner"),
    Seam(
        f"{_ARGS}.model_override_base",
        "register_model_override",
        "signature",
        ("architecture",),
        "keep the user's choice through argument resolution",
    ),
    Seam(
        f"{_ARGS}.model_overrides.deepseek_v4",
        "_deepseek_v4_overrides",
        "signature",
        ("server_args", "hf_config"),
        "answer after SGLang's own override of the backend",
    ),
    Seam(
        "sglang.srt.layers.cp.base",
        "CPAttentionBackendKind.from_string",
        "signature",
        ("cls", "value"),
        "give the name the calling convention of dsv4",
    ),
    Seam(
        "sglang.srt.layers.cp.base",
        "CPAttentionBackendKind.from_string",
        "literal",
        ("dsv4",),
        "give the name the calling convention of dsv4",
    ),
    Seam(
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory._create_backend",
        "signature",
        ("self", "backend_name", "backend_map", "error_template", "stamps_children"),
        "give draft models SGLang's own backend",
    ),
    Seam(
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory.create_decode_backend",
        "literal",
        ("dsv4",),
        "give draft models SGLang's own backend",
    ),
    Seam(
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory.create_draft_extend_backend",
        "literal",
        ("dsv4",),
        "give draft models SGLang's own backend",
    ),
    Seam(
        _SETUP,
        "_build_resolved_backend",
        "signature",
        ("*model_runner", "*resolved", "*init_new_workspace"),
        "serve one phase and leave the other to SGLang",
    ),
    Seam(
        _SETUP,
        "_build_backend_from_str",
        "signature",
        ("*model_runner", "*backend_str", "*init_new_workspace"),
        "serve one phase and leave the other to SGLang",
    ),
    Seam(
        _SETUP,
        "ResolvedAttentionBackendStr",
        "fields",
        ("prefill", "decode"),
        "serve one phase and leave the other to SGLang",
    ),
    # Decode graphs for short contexts.
    Seam(
        f"{_EXECUTOR}.runner.decode_cuda_graph_runner",
        "create_dsv41_candidate_graph_variants",
        "attribute",
        (),
        _SHORT,
    ),
    Seam(
        f"{_ATTENTION}.graph_variants",
        "create_dsv41_candidate_graph_variants",
        "signature",
        ("model_runner", "capture_forward_mode", "captured_req_width"),
        _SHORT,
    ),
    Seam(
        f"{_ATTENTION}.graph_variants",
        "Dsv41CandidateGraphVariants",
        "fields",
        ("graph_limits", "capture_labels", "select"),
        _SHORT,
    ),
    Seam(f"{_ATTENTION}.graph_variants", "DSV41_CANDIDATE_FILTERED", "attribute", (), _SHORT),
    Seam(f"{_EXECUTOR}.forward_batch_info", "ForwardMode", "fields", ("is_decode",), _SHORT),
    Seam(
        f"{_EXECUTOR}.runner_utils.capture_mode",
        "skip_low_ratio_indexer",
        "literal",
        ("candidate_all", "candidate_c2_all"),
        _SHORT,
    ),
    Seam(
        f"{_EXECUTOR}.runner_utils.capture_mode",
        "skip_candidate_filtering",
        "literal",
        ("candidate_all", "candidate_c2_all"),
        _SHORT,
    ),
    Seam(_V4, "fill_all_compressed_indices", "attribute", (), _SHORT),
    # Backend.
    Seam("sglang.srt.runtime_context", "attention_backends", "signature", (), "know which phases are ours"),
    Seam(
        _V4,
        "DeepseekV4AttnBackend.__init__",
        "signature",
        ("self", "model_runner", "skip_prefill", "speculative_step_id", "topk", "speculative_num_steps"),
        "construct the backend that ours extends",
    ),
    Seam(
        _V4,
        "DeepseekV4AttnBackend",
        "instance",
        (
            "prefill_candidates",
            "decode_candidates",
            "full_topk_indexer",
            "token_to_kv_pool",
            "req_to_token",
            "page_size",
            "low_ratios",
            "device",
        ),
        "put our candidate objects in place and size their buffers",
    ),
    Seam(_V4, "make_candidate_indexer", "attribute", (), "replace the objects that it makes"),
    Seam(
        _TRTLLM,
        "create_deepseek_v4_attn_backend",
        "signature",
        ("model_runner", "**kwargs"),
        "give draft models SGLang's own backend",
    ),
    Seam(_TRTLLM, "DeepseekV4TrtllmAttnBackend", "attribute", (), "extend the attention variant that is in use"),
    Seam(_TRTLLM, "DeepseekV4MegaAttnBackend", "attribute", (), "extend the attention variant that is in use"),
    Seam(_TRTLLM, "is_dsv4_trtllm_attn_enabled", "signature", (), "extend the attention variant that is in use"),
    Seam(_TRTLLM, "is_dsv4_mega_attn_enabled", "signature", (), "extend the attention variant that is in use"),
    # Requirements.
    Seam(
        f"{_ATTENTION}.dsa.dsa_topk_backend",
        "DSATopKBackend",
        "fields",
        ("SGL_KERNEL", "TORCH", "FLASHINFER", "resolve"),
        "refuse a top-k backend that the compact selection cannot honour",
    ),
    Seam(
        f"{_ATTENTION}.dsa.dsa_topk_backend",
        "DSATopKBackend.resolve",
        "signature",
        ("cls", "model_runner"),
        "refuse a top-k backend that the compact selection cannot honour",
    ),
    Seam(
        "sglang.srt.layers.deep_gemm_wrapper.configurer",
        "DEEPGEMM_PAGED_SPARSE_MQA_LOGITS",
        "attribute",
        (),
        "know whether DeepGEMM's sparse kernels are usable",
    ),
    Seam(
        "sglang.srt.runtime_context",
        "get_parallel",
        "signature",
        (),
        "refuse parallel modes not supported yet, and size buffers by the attention-TP group",
    ),
    Seam("sglang.srt.runtime_context", "get_exec", "signature", (), "refuse two-batch overlap"),
    Seam("sglang.srt.runtime_context", "get_schedule", "signature", (), "size buffers by the prefill chunk"),
    Seam(
        "sglang.srt.runtime_context",
        "max_speculative_num_draft_tokens",
        "signature",
        (),
        "size buffers by the draft tokens",
    ),
    # Metrics and audit.
    Seam("sglang.srt.runtime_context", "get_observability", "signature", (), _METRICS),
    Seam("sglang.srt.runtime_context", "get_serving", "signature", (), _METRICS),
    Seam(
        f"{_ARGS}.fields.observability",
        "Observability",
        "fields",
        ("enable_metrics", "enable_metrics_for_all_schedulers", "extra_metric_labels"),
        _METRICS,
    ),
    Seam(f"{_ARGS}.fields.serving", "Serving", "fields", ("served_model_name",), _METRICS),
    Seam(
        f"{_EXECUTOR}.model_runner",
        "ModelRunner.forward",
        "signature",
        ("self", "forward_batch"),
        _COUNT,
    ),
    Seam(f"{_EXECUTOR}.model_runner", "ModelRunnerOutput", "fields", ("can_run_graph",), _COUNT),
    Seam(f"{_EXECUTOR}.forward_batch_info", "ForwardMode", "fields", ("is_decode", "is_target_verify"), _COUNT),
    Seam(
        f"{_EXECUTOR}.forward_batch_info",
        "ForwardBatch",
        "fields",
        ("forward_mode", "batch_size", "input_ids", "seq_lens_cpu"),
        _COUNT,
    ),
    Seam(
        f"{_EXECUTOR}.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner",
        "instance",
        ("attention_graph_variants",),
        _COUNT,
    ),
    Seam(
        f"{_EXECUTOR}.runner_utils.capture_mode",
        "skip_candidate_filtering",
        "literal",
        ("candidate_all", "candidate_c2_all", "candidate_unfiltered"),
        _COUNT,
    ),
    # The calls that SGLang's backend makes on the candidate objects, and their inputs.
    Seam(
        f"{_INDEXER}.types",
        "PrefillInputs",
        "fields",
        (
            "indexer",
            "layer_id",
            "compress_ratio",
            "freqs_cis",
            "x",
            "q_lora",
            "positions",
            "req_rows",
            "req_pool_indices",
            "index_plans",
            "kv_page_table",
            "seq_lens_cpu",
            "rows_per_request",
            "rows_per_request_device",
            "out_raw_indices",
            "out_page_indices",
            "reset_outputs",
        ),
        "read an extend's rows and write its selection",
    ),
    Seam(
        f"{_INDEXER}.types",
        "DecodeInputs",
        "fields",
        (
            "indexer",
            "layer_id",
            "compress_ratio",
            "freqs_cis",
            "x",
            "q_lora",
            "positions",
            "req_rows",
            "paged_metadata",
            "is_verify",
            "out_page_indices",
            "reset_outputs",
        ),
        "read a decode or verify step's rows and write its selection",
    ),
    Seam(
        f"{_INDEXER}.types",
        "PrefillCandidates.publish_prefill",
        "signature",
        ("self", "inputs"),
        "serve as the backend's prefill candidates",
    ),
    Seam(
        f"{_INDEXER}.types",
        "PrefillCandidates.consume_prefill",
        "signature",
        ("self", "inputs", "published"),
        "serve as the backend's prefill candidates",
    ),
    Seam(
        f"{_INDEXER}.types",
        "DecodeCandidates.publish_decode",
        "signature",
        ("self", "inputs"),
        "serve as the backend's decode candidates",
    ),
    Seam(
        f"{_INDEXER}.types",
        "DecodeCandidates.consume_decode",
        "signature",
        ("self", "inputs", "published"),
        "serve as the backend's decode candidates",
    ),
    Seam(
        f"{_INDEXER}.full_topk",
        "FullTopKIndexer.topk_prefill",
        "signature",
        ("self", "inputs"),
        "serve the full top-k layers",
    ),
    Seam(
        f"{_INDEXER}.full_topk",
        "FullTopKIndexer.topk_decode",
        "signature",
        ("self", "inputs"),
        "serve the full top-k layers",
    ),
    Seam(
        f"{_INDEXER}.types",
        "CandidateMetadata.tail",
        "signature",
        ("self", "rows_per_request"),
        "hand a schedule to the late-layer tail",
    ),
    Seam(
        f"{_INDEXER}.types",
        "get_tail_row_indices",
        "signature",
        ("full_rows_per_request", "tail_rows_per_request", "device"),
        "hand a schedule to the late-layer tail",
    ),
    Seam(
        _INDEXER,
        "make_candidate_indexer",
        "signature",
        ("*token_to_kv_pool", "*req_to_token", "*page_size", "*candidate_topk_blocks", "*candidate_block_size"),
        "know what the backend's candidate objects were made for",
    ),
    Seam(
        f"{_INDEXER}.dense_blocks",
        "DenseBlocksBackend.__init__",
        "signature",
        (
            "self",
            "*token_to_kv_pool",
            "*req_to_token",
            "*candidate_topk_blocks",
            "*candidate_block_size",
            "*use_deep_gemm_prefill",
        ),
        "score an extend where DeepGEMM cannot",
    ),
    Seam(
        f"{_INDEXER}.full_topk",
        "FullTopKIndexer.__init__",
        "signature",
        ("self", "*token_to_kv_pool", "*req_to_token", "*use_deep_gemm_prefill", "*use_deep_gemm_decode"),
        "score an extend where DeepGEMM cannot",
    ),
    Seam(
        f"{_INDEXER}.dense_blocks",
        "DenseBlocksBackend.publish_prefill",
        "signature",
        ("self", "inputs"),
        "take the source's blocks of an extend",
    ),
    Seam(
        f"{_INDEXER}.sparse_table",
        "SparseTableBackend.publish_prefill_graph",
        "signature",
        ("self", "inputs", "num_rows", "table"),
        _PREFILL_GRAPH,
    ),
    Seam(
        f"{_INDEXER}.sparse_table",
        "SparseTableBackend.prefill_graph_table",
        "signature",
        ("self", "layer_id", "num_rows"),
        _PREFILL_GRAPH,
    ),
    Seam(
        f"{_INDEXER}.sparse_table",
        "SparseTableBackend.bind_prefill_graph_table",
        "signature",
        ("self", "tensors"),
        _PREFILL_GRAPH,
    ),
    Seam(
        f"{_INDEXER}.sparse_table",
        "SparseTableBackend.consume_prefill_captured",
        "signature",
        ("self", "inputs", "published"),
        _PREFILL_GRAPH,
    ),
    Seam(f"{_INDEXER}.types", "CapturedPrefillInputs", "attribute", (), _PREFILL_GRAPH),
    Seam(_V4, "DeepseekV4AttnBackend.low_ratio_prefill_graph", "signature", ("self",), _PREFILL_GRAPH),
    Seam(f"{_INDEXER}.dense_blocks", "BlockIds", "fields", ("blocks",), "take the source's blocks of an extend"),
    Seam(f"{_INDEXER}.scoring", "prefill_index_plan", "signature", ("inputs",), "find each row's request in an extend"),
    Seam(
        f"{_INDEXER}.scoring",
        "PrefillIndexPlan",
        "fields",
        ("request_starts", "lens_per_request", "compress_lens"),
        "find each row's request in an extend",
    ),
    Seam(
        f"{_ATTENTION}.dsv4.metadata",
        "PagedIndexerMetadata",
        "fields",
        (
            "page_table",
            "compressed_page_size",
            "compressed_seq_lens",
            "compress_ratio",
            "topk_metadata",
            "row_chunks",
            "max_compressed_seq_len",
        ),
        "read the page table and the visible lengths of a decode step",
    ),
    Seam(
        f"{_ATTENTION}.dsv4.metadata",
        "expand_index_page_table",
        "signature",
        ("page_table", "*full_page_size", "*compress_ratio", "*index_page_size"),
        "page the index-K pool in DeepGEMM's pages",
    ),
    Seam(
        f"{_ATTENTION}.dsv4.dsv41_sparse",
        "DeepseekV41Indexer.queries",
        "signature",
        ("self", "q_lora", "freqs", "positions"),
        "project a consumer's own queries",
    ),
    Seam(
        f"{_ATTENTION}.dsv4.dsv41_sparse",
        "DeepseekV41Indexer.head_weights",
        "signature",
        ("self", "x"),
        "project a consumer's own head weights",
    ),
    # Index-K pool.
    Seam(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool",
        f"{_POOL}.get_index_k_page_size",
        "signature",
        ("self", "compress_ratio"),
        "read the index-K page size",
    ),
    Seam(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool",
        f"{_POOL}.get_index_k_with_scale_buffer",
        "signature",
        ("self", "layer_id"),
        "read the index K",
    ),
    Seam(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool",
        f"{_POOL}.low_ratio_index_k_is_split",
        "signature",
        ("self", "layer_id"),
        "refuse another index-K layout",
    ),
    Seam(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool",
        f"{_POOL}.low_ratio_index_k_page8",
        "signature",
        ("self", "layer_id"),
        "refuse another index-K layout",
    ),
    # Kernels of SGLang that the kernel sets call, and its builder of ours.
    Seam("sglang.kernels.jit.utils", "load_jit", "attribute", (), "build the Hopper kernels"),
    Seam(
        "sglang.kernels.jit.utils.compile.loader",
        "load_jit",
        "signature",
        ("*cuda_files", "*cuda_wrappers"),
        "build the Hopper kernels",
    ),
    Seam(
        f"{_INDEXER}.scoring",
        "_index_q_and_weights",
        "signature",
        ("*indexer", "*x", "*q_lora", "*freqs_cis", "*positions"),
        "quantise queries for DeepGEMM",
    ),
    Seam(
        f"{_INDEXER}.scoring",
        "DeepGEMMDecodeData.paged_logits_args",
        "signature",
        ("self", "metadata", "rows"),
        "score the source's rows with DeepGEMM",
    ),
    Seam(
        f"{_OPS}.dsv4.index_logits",
        "deep_gemm_fp4_paged_mqa_logits",
        "signature",
        ("q_fp4", "k_cache", "weights", "seq_lens", "page_table", "deep_gemm_metadata", "max_seq_len"),
        "score the source's rows with DeepGEMM",
    ),
    Seam(
        f"{_OPS}.dsv4.candidate_blocks",
        "candidate_row_lens",
        "signature",
        ("seq_lens", "topk_blocks", "block_size"),
        "choose candidate blocks",
    ),
    Seam(
        f"{_OPS}.dsv4.candidate_blocks",
        "amax_topk_blocks",
        "signature",
        ("logits", "seq_lens", "nblocks", "topk_blocks", "max_seq_len"),
        "choose candidate blocks",
    ),
    Seam(
        f"{_OPS}.dsv4.topk",
        "topk_transform_bf16_small",
        "signature",
        ("scores", "seq_lens", "page_table", "out_page_indices", "page_size"),
        "select in the compact columns",
    ),
    Seam(f"{_OPS}.deep_select", "is_deep_select_supported", "signature", (), "select over the visible context"),
    Seam(
        f"{_OPS}.deep_select",
        "topk_page_transform",
        "signature",
        ("input", "topk", "*page_table", "*page_size", "*end", "*sorted_index", "*output_idx"),
        "select over the visible context",
    ),
)

# What `dsv41-sparse bench kernels` times beside ours. A server needs none of it.
_TIME = "time SGLang's Hopper kernels"
BENCH_SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_OPS}.dsv4.fp4_indexer",
        "fp4_index_logits_paged",
        "signature",
        ("q", "weights", "req", "req_table", "lens", "table", "page_size", "max_len", "ratio", "candidate_mask"),
        _TIME,
    ),
    Seam(
        f"{_OPS}.dsv4.fp4_indexer",
        "finish_paged_indexer_topk",
        "signature",
        ("indices", "scores", "lengths", "req", "req_table", "page_indices", "raw_indices", "ratio", "mask_scores"),
        _TIME,
    ),
    Seam(f"{_OPS}.dsv4.topk", "plan_topk_v2", "signature", ("seq_lens",), _TIME),
    Seam(
        f"{_OPS}.dsv4.topk",
        "topk_transform_paged_v2",
        "signature",
        ("scores", "seq_lens", "page_tables", "out_page_indices", "page_size", "metadata"),
        _TIME,
    ),
    Seam(
        f"{_OPS}.dsv4.candidate_blocks",
        "amax_topk_blocks",
        "signature",
        ("logits", "seq_lens", "nblocks", "topk_blocks"),
        _TIME,
    ),
    Seam(
        f"{_OPS}.dsv4.candidate_blocks", "candidate_block_mask", "signature", ("blocks", "width", "block_size"), _TIME
    ),
)


def installed_version() -> str | None:
    """SGLang's installed version, None if its metadata is missing."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check(seams: Iterable[Seam] | None = None, package: Path | None = None) -> list[Mismatch]:
    """Every seam that SGLang does not have in the expected form; imports no SGLang module.

    Args:
        seams: the rows to check, by default all that a server needs.
        package: folder of the ``sglang`` package to read, by default the installed one.
    """
    if package is not None:
        roots = [package]
    else:
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            return [Mismatch("sglang", f"SGLang {SUPPORTED}", "no sglang package", "serve at all")]
        roots = [Path(location) for location in spec.submodule_search_locations]
    load = functools.cache(lambda module: _parse(module, roots))
    mismatches = []
    # Syntax trees are many objects: each would have the collector walk all that SGLang has loaded.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for seam in SEAMS if seams is None else seams:
            expected, found = _compare(seam, load(seam.module))
            if found is not None:
                mismatches.append(Mismatch(seam.dotted, expected, found, seam.why))
    finally:
        if collecting:
            gc.enable()
    return mismatches


def _parse(module: str, roots: list[Path]) -> ast.Module | None:
    """The syntax tree of a module below sglang, None if there is no such file."""
    relative = Path(*module.split(".")[1:])
    for root in roots:
        for path in (root / relative.with_suffix(".py"), root / relative / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return None


def _compare(seam: Seam, tree: ast.Module | None) -> tuple[str, str | None]:
    """What the seam expects and, where SGLang differs, what is there instead."""
    expected = {
        "attribute": "the name",
        "signature": f"parameters ({', '.join(seam.expected)})",
        "fields": f"members {', '.join(seam.expected)}",
        "instance": f"__init__ to set {', '.join(seam.expected)}",
        "literal": f"the constants {', '.join(map(repr, seam.expected))} in it",
    }[seam.kind]
    if tree is None:
        return expected, "no such module"
    node: ast.AST | None = tree
    for part in seam.name.split("."):
        node = _bindings(node).get(part)
        if node is None:
            return expected, "no such name"
    if seam.kind == "attribute":
        return expected, None
    if seam.kind == "signature":
        return expected, _signature_difference(seam.expected, node)
    if seam.kind == "fields":
        have = set(_bindings(node))
    elif seam.kind == "instance":
        have = _set_in_init(node)
    else:
        have = {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
    missing = [name for name in seam.expected if name not in have]
    return expected, f"none of {', '.join(missing)}" if missing else None


def _bindings(node: ast.AST) -> dict[str, ast.AST]:
    """Names that the body of a module or class binds, those inside ``if`` and ``try`` included."""
    bound: dict[str, ast.AST] = {}
    pending = list(getattr(node, "body", ()))
    while pending:
        statement = pending.pop(0)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound[statement.name] = statement
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            bound.update(((alias.asname or alias.name).split(".")[0], statement) for alias in statement.names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                bound.update((name.id, statement) for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(statement, (ast.If, ast.Try)):
            pending += statement.body + statement.orelse
            pending += [inner for handler in getattr(statement, "handlers", ()) for inner in handler.body]
    return bound


def _set_in_init(node: ast.AST) -> set[str]:
    """Attributes of ``self`` that the class's ``__init__`` assigns."""
    init = _bindings(node).get("__init__")
    return {
        inner.attr
        for inner in (ast.walk(init) if init is not None else ())
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


def _signature_difference(expected: tuple[str, ...], node: ast.AST) -> str | None:
    """How a function differs from the expected parameters, None if our calls fit it."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"a {type(node).__name__}, not a function"
    args = node.args
    positional = [arg.arg for arg in args.posonlyargs + args.args]
    optional = set(positional[len(positional) - len(args.defaults) :])
    keyword_only = [arg.arg for arg in args.kwonlyargs]
    optional |= {name for name, default in zip(keyword_only, args.kw_defaults) if default is not None}
    catch_all = [f"**{args.kwarg.arg}"] if args.kwarg else []
    found = f"({', '.join(positional + [f'*{name}' for name in keyword_only] + catch_all)})"

    want_positional = [name for name in expected if not name.startswith("*")]
    want_keywords = [name[1:] for name in expected if name.startswith("*") and not name.startswith("**")]
    # What we pass by keyword may be positional too; what we pass by position may not move.
    fits = (
        positional[: len(want_positional)] == want_positional
        and set(want_keywords) <= {*positional, *keyword_only}
        and (not any(name.startswith("**") for name in expected) or args.kwarg is not None)
    )
    extra = {*positional, *keyword_only} - {*want_positional, *want_keywords} - optional
    return None if fits and not extra else f"parameters {found}"
