"""The upstream patches: they apply to the installed SGLang, and what they promise holds without our hooks."""

import importlib.util
import json
import os
import pathlib
import py_compile
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("sglang")

ROOT = pathlib.Path(__file__).parents[2]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
SGLANG = pathlib.Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
NAME = "dsv41-sparse"


def touched(patch):
    return re.findall(r"^\+\+\+ b/python/sglang/(\S+)$", patch.read_text(), re.MULTILINE)


def git_apply(tree, patch, *options):
    return subprocess.run(["git", "apply", *options, patch], cwd=tree, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """The files that the series touches, with all of it applied, in upstream's layout."""
    tree = tmp_path_factory.mktemp("upstream")
    for file in {file for patch in PATCHES for file in touched(patch)}:
        (tree / "python/sglang" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SGLANG / file, tree / "python/sglang" / file)
    for patch in PATCHES:
        done = git_apply(tree, patch)
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"
    return tree


def test_series_is_complete():
    assert [patch.name[:4] for patch in PATCHES] == [f"{number:04}" for number in range(1, 10)]
    subjects = [re.match(r"Subject: \[PATCH (\d)/(\d)\] \w", patch.read_text()).groups() for patch in PATCHES]
    assert subjects == [(str(number), "9") for number in range(1, 10)]
    table = (ROOT / "patches" / "README.md").read_text()
    assert all(f"`{patch.stem}`" in table for patch in PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_applies_alone_and_carries_little_context(patch, tmp_path):
    for file in touched(patch):
        (tmp_path / "python/sglang" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SGLANG / file, tmp_path / "python/sglang" / file)
    done = git_apply(tmp_path, patch, "--check", "--verbose")
    assert done.returncode == 0, done.stderr
    hunks = re.split(r"^@@.*$", patch.read_text(), flags=re.MULTILINE)[1:]
    assert all(len(re.findall(r"^ ", hunk, re.MULTILINE)) <= 3 for hunk in hunks)


def test_patched_files_compile(patched):
    files = sorted(patched.rglob("*.py"))
    assert len(files) == 11
    for file in files:
        py_compile.compile(str(file), doraise=True)


# Imports the patched files in place of the installed ones.
OVERLAY = """
import importlib.abc, importlib.util, json, pathlib, sys, types
root = pathlib.Path(sys.argv.pop(1))

class Overlay(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        folder = root.joinpath(*name.split("."))
        if (folder / "__init__.py").is_file():
            installed = [pathlib.Path(entry, folder.name) for entry in path]
            return importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(where) for where in installed]
            )
        file = folder.with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None

sys.meta_path.insert(0, Overlay())
"""

SPLITS = [(NAME, "dsv4"), ("dsv4", NAME), (NAME, NAME), ("dsv4", "dsv4"), ("fa3", "triton"), (NAME, "triton")]
BEHAVIOUR = (
    OVERLAY
    + f"""
from sglang.srt.arg_groups import choices
assert choices.__file__.startswith(str(root))
choices.add_attention_backend_choices([{NAME!r}])
choices.add_dsv4_attention_backend({NAME!r})
from tests.sglang.test_plugin import CHOICES, backends, resolve
out = {{"resolution": {{name: backends(resolve(sys.argv[1], *options)) for name, (options, _) in CHOICES.items()}}}}

from sglang.srt.layers.cp.base import CPAttentionBackendKind
out["cp"] = [CPAttentionBackendKind.from_string(name).name for name in ({NAME!r}, "dsv4", "fa3")]
try:
    CPAttentionBackendKind.from_string("unheard-of")
except ValueError:
    out["cp"].append("refused")

from sglang.srt.speculative import draft_utils
factory = object.__new__(draft_utils.DraftBackendFactory)
factory.draft_attn_backend = None
maps = {{name: lambda name=name: (name, types.SimpleNamespace()) for name in ("dsv4", "fa3")}}
out["draft"] = []
for target in ({NAME!r}, "dsv4", "fa3"):
    draft_utils.attention_backends = lambda: (target, target)
    made = factory._create_backend("decode_attention_backend", maps, "")
    out["draft"].append(made.decode_attention_backend_str)

from sglang.srt.layers.attention import hybrid_attn_backend
from sglang.srt.model_executor.model_runner_components import attention_backend_setup as setup
setup.attn_backend_wrapper = lambda runner, backend: backend
hybrid_attn_backend.HybridAttnBackend = lambda model_runner, **made: [made["prefill_backend"], made["decode_backend"]]
out["phases"] = []
for prefill, decode in {SPLITS!r}:
    for name in (prefill, decode):
        setup.ATTENTION_BACKENDS[name] = lambda runner, name=name: name
    resolved = setup.ResolvedAttentionBackendStr(prefill=prefill, decode=decode)
    out["phases"].append(
        setup._build_resolved_backend(
            model_runner=types.SimpleNamespace(), resolved=resolved, init_new_workspace=False
        )
    )

from unittest.mock import MagicMock
from sglang.srt.layers.attention import deepseek_v4_backend as v4
from sglang.srt.layers.attention.dsv4 import v41_indexer
class Asked(Exception):
    pass
class Backend(v4.DeepseekV4AttnBackend):
    def make_candidate_indexer(self, **arguments):
        raise Asked(sorted(arguments))
v4.is_cuda = lambda: False
runner = MagicMock()
runner.device, runner.page_size, runner.model_config.head_dim = "cpu", 256, 512
runner.token_to_kv_pool.swa_page_size = 256
try:
    Backend(runner)
except Asked as asked:
    out["candidates"] = asked.args[0]
out["stock factory"] = v4.DeepseekV4AttnBackend.make_candidate_indexer is v41_indexer.make_candidate_indexer

from tests.sglang.test_graph_variants import runner_module, variants_of_a_runner
assert runner_module.__file__.startswith(str(root))
stock = types.SimpleNamespace(dllm_attention=None)
ours = types.SimpleNamespace(dllm_attention=None)
ours.create_candidate_graph_variants = lambda model_runner, mode, width: [model_runner.gpu_id, mode.name]
out["variants"] = [variants_of_a_runner(setattr, backend) for backend in (ours, stock)]
out["stock variants"] = variants_of_a_runner(setattr, stock, (10, 0)).graph_limits

import torch
from sglang.srt.layers.attention.dsv4 import v41_indexer
from sglang.srt.layers.attention.dsv4.v41_indexer.sparse_table import SparseTableBackend
assert v41_indexer.__file__.startswith(str(root))
bare = object.__new__(v4.DeepseekV4AttnBackend)
bare.low_ratios = (1, 2)
out["prefill graph"] = []
for candidates in (object.__new__(SparseTableBackend), types.SimpleNamespace(serves_prefill_graph=True), object()):
    bare.prefill_candidates = candidates
    out["prefill graph"].append(bare.low_ratio_prefill_graph)
bare.low_ratios, bare.prefill_candidates = (), object.__new__(SparseTableBackend)
out["prefill graph"].append(bare.low_ratio_prefill_graph)

v41_indexer.is_cuda = lambda: True
out["families"] = {{}}
for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)):
    torch.cuda.get_device_capability = lambda device=None: capability
    for name in ("is_sm100_or_newer", "has_sm100_mqa_logits", "_use_deep_gemm_prefill"):
        getattr(v41_indexer, name).cache_clear()
    v41_indexer.has_dense_fp4_indexer = lambda: True
    full = v41_indexer.make_full_topk_indexer(token_to_kv_pool=None, req_to_token=None)
    seen = [v41_indexer.is_sm100_or_newer(), full.use_deep_gemm_prefill, full.use_deep_gemm_decode]
    try:
        prefill, decode = v41_indexer.make_candidate_indexer(
            token_to_kv_pool=None, req_to_token=None, page_size=256, candidate_topk_blocks=4, candidate_block_size=8
        )
        assert prefill is decode
        seen += [type(decode).__name__, prefill.use_deep_gemm_prefill]
    except Exception as error:
        seen += [str(error).split(" (")[0]]
    out["families"]["%d.%d" % capability] = seen
print(json.dumps(out))
"""
)


def run(script, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def behaviour(patched, tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    shutil.copyfile(ROOT / "tests/data/tiny_v41.json", model / "config.json")
    done = run(BEHAVIOUR, patched / "python", model, DSV41_SPARSE_DISABLE="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_0001_keeps_the_choice_without_our_provider(behaviour):
    from .test_plugin import CHOICES

    assert {name: tuple(seen) for name, seen in behaviour["resolution"].items()} == {
        name: expected for name, (_, expected) in CHOICES.items()
    }


def test_0002_knows_the_cp_kind(behaviour):
    assert behaviour["cp"] == ["DSV4", "DSV4", "FLASH_ATTENTION", "refused"]


def test_0003_runs_the_draft_on_dsv4(behaviour):
    assert behaviour["draft"] == ["dsv4", "dsv4", "fa3"]


@pytest.mark.parametrize("program", ["one_batch", "offline_throughput"])
def test_0004_benchmark_accepts_the_plugin_backend(patched, program, tmp_path):
    script = (
        OVERLAY + f"import runpy; runpy.run_module('sglang.benchmark.{program}', run_name='__main__', alter_sys=True)"
    )
    done = run(script, patched / "python", "--model-path", tmp_path, "--attention-backend", NAME)
    # It gets as far as the model folder, which has no config.
    assert done.returncode == 1 and "invalid choice" not in done.stderr
    assert str(tmp_path) in done.stderr and "config" in done.stderr


def test_0005_subclass_makes_its_own_candidate_objects(behaviour):
    assert behaviour["stock factory"] is True
    assert behaviour["candidates"] == [
        "candidate_block_size", "candidate_topk_blocks", "page_size", "req_to_token", "token_to_kv_pool",
    ]  # fmt: skip


def test_0006_builds_one_backend_for_two_phases(behaviour):
    assert behaviour["phases"] == [NAME, NAME, NAME, "dsv4", ["fa3", "triton"], [NAME, "triton"]]


def test_0007_backend_makes_its_own_graph_variants(behaviour):
    assert behaviour["variants"] == [[0, "DECODE"], None]
    assert [label for label, _ in behaviour["stock variants"]] == [
        "candidate_all", "candidate_c2_all", "candidate_unfiltered",
    ]  # fmt: skip


def test_0008_asks_for_the_capability(behaviour):
    # SGLang's object, one that says it serves the calls, one that says nothing, and a model without low ratios.
    assert behaviour["prefill graph"] == [True, True, False, False]


def test_0009_takes_deepgemm_on_10_only(behaviour):
    dense = [False, False, "DenseBlocksBackend", False]
    sm100 = [True, True, True, "the candidate indexer needs DeepGEMM's paged sparse MQA logits"]
    assert behaviour["families"] == {
        **{name: [False, *dense] for name in ("8.0", "8.9", "9.0")},
        **{name: sm100 for name in ("10.0", "10.3")},  # without DeepGEMM here
        **{name: [True, *dense] for name in ("11.0", "12.0", "12.1")},
    }
