"""The plugin in real SGLang: argument resolution, spawned processes, refusals, hooks. No GPU."""

import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import types

import pytest

from sglang_dsv41 import plugin, seams

pytest.importorskip("sglang")

NAME = "dsv41-sparse"
DATA = pathlib.Path(__file__).parents[1] / "data"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model folders: configs are all that resolution reads."""
    root = tmp_path_factory.mktemp("models")
    configs = {"v41": json.loads((DATA / "tiny_v41.json").read_text()), "llama": LLAMA}
    for name, config in configs.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """SGLang's own loading, through the installed entry point."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


def server_args(model, *options):
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(
        ["--model-path", str(model), "--device", "cuda", "--skip-tokenizer-init", "--random-seed", "1", *options]
    )


def resolve(model, *options):
    """What a server started with these options would run."""
    from sglang.srt.arg_groups.overrides import resolved_view

    args = server_args(model, *options)
    args.resolve_once()
    args.check_server_args()
    return resolved_view(args)


def backends(view):
    from sglang.srt.arg_groups.overrides import attention_backends_of

    return (view.attention_backend, *attention_backends_of(view))


def everything(view):
    from sglang.srt.server_args import ServerArgs

    return {field: repr(getattr(view, field)) for field in ServerArgs.__struct_fields__}


def fresh(script, **environment):
    """Run a script in a new process; it prints one JSON object last."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


# ---- resolution ----

CHOICES = {
    "none": ((), ("dsv4", "dsv4", "dsv4")),
    "stock": (("--attention-backend", "dsv4"), ("dsv4", "dsv4", "dsv4")),
    "base": (("--attention-backend", NAME), (NAME, NAME, NAME)),
    "prefill": (("--prefill-attention-backend", NAME), ("dsv4", NAME, "dsv4")),
    "decode": (("--decode-attention-backend", NAME), ("dsv4", "dsv4", NAME)),
    "both phases": (
        ("--prefill-attention-backend", NAME, "--decode-attention-backend", NAME),
        # SGLang makes the base of two equal phases.
        (NAME, NAME, NAME),
    ),
    "base, stock decode": (("--attention-backend", NAME, "--decode-attention-backend", "dsv4"), (NAME, NAME, "dsv4")),
    # SGLang replaces any other choice for this model; the plugin leaves that as it is.
    "another": (("--attention-backend", "triton"), ("dsv4", "dsv4", "dsv4")),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_is_the_backend_after_resolution(models, choice):
    options, expected = CHOICES[choice]
    assert backends(resolve(models / "v41", *options)) == expected


@pytest.mark.parametrize(
    "options, cp_size",
    [((), 1), (("--tp-size", "4", "--enable-prefill-cp", "--cp-strategy", "interleave"), 4)],
    ids=["", "context-parallel prefill"],
)
def test_everything_but_the_backend_resolves_as_stock(models, monkeypatch, options, cp_size):
    from sglang.srt.layers.cp import base

    monkeypatch.setattr(base, "_STRATEGY", None)  # resolution sets it for the process
    stock, ours = (
        everything(resolve(models / "v41", "--attention-backend", name, *options)) for name in ("dsv4", NAME)
    )
    assert {field for field in stock if stock[field] != ours[field]} == {"attention_backend"}
    assert ours["page_size"] == "256" and ours["kv_cache_dtype"] == "'fp8_e4m3'"
    assert ours["attn_cp_size"] == str(cp_size)


RESOLVE_WITHOUT = f"""
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from tests.sglang.test_plugin import everything, resolve
print(json.dumps({{
    "known": {NAME!r} in ATTENTION_BACKEND_CHOICES,
    **{{name: everything(resolve(f"{{sys.argv[1]}}/{{name}}")) for name in ("v41", "llama")}},
}}))
"""


def test_off_switch_and_other_models_are_as_without_the_plugin(models):
    script = RESOLVE_WITHOUT.replace("sys.argv[1]", repr(str(models)))
    without, log = fresh(script, DSV41_SPARSE_DISABLE="1")
    assert without.pop("known") is False
    assert "DSV41_SPARSE_DISABLE is set" in log
    for name, stock in without.items():
        assert everything(resolve(models / name)) == stock


def test_other_model_with_our_name_resolves_undisturbed(models):
    # The refusal comes at engine start, from the requirements.
    stock, ours = (everything(resolve(models / "llama", "--attention-backend", name)) for name in ("triton", NAME))
    assert ours["attention_backend"] == repr(NAME)
    assert {field for field in stock if stock[field] != ours[field]} == {"attention_backend"}


def resolve_in_child(model, queue):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    queue.put(backends(resolve(model, "--attention-backend", NAME)))


def test_spawned_process_resolves_alike(models):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=resolve_in_child, args=(models / "v41", queue))
    child.start()
    assert queue.get(timeout=120) == (NAME, NAME, NAME)
    child.join(30)
    assert child.exitcode == 0


def test_resolved_arguments_keep_the_choice_when_pickled(models):
    import pickle

    from sglang.srt.arg_groups.overrides import resolved_view

    args = server_args(models / "v41", "--attention-backend", NAME)
    args.resolve_once()
    assert backends(resolved_view(pickle.loads(pickle.dumps(args)))) == (NAME, NAME, NAME)


# ---- registration ----


def test_registered_once():
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.arg_groups.model_override_base import _MODEL_OVERRIDE_FNS

    plugin.register()
    assert ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    providers = _MODEL_OVERRIDE_FNS[plugin.ARCHITECTURE]
    assert providers.count(plugin.keep_choice) == 1
    assert providers[-1] is plugin.keep_choice


def test_registry_creates_our_backend_on_demand(monkeypatch):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    asked = []
    stand_in = types.ModuleType("sglang_dsv41.backend")
    stand_in.create_backend = lambda runner: asked.append(runner) or "backend"
    monkeypatch.setitem(sys.modules, "sglang_dsv41.backend", stand_in)
    monkeypatch.setattr("sglang_dsv41.backend", stand_in, raising=False)
    assert ATTENTION_BACKENDS[NAME]("runner") == "backend"
    assert asked == ["runner"]


FRESH = f"""
import argparse, dataclasses, json, logging, sys
import sglang.srt.plugins
from sglang_dsv41 import plugin, seams

records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append((record.levelname, self.format(record)))
plugin.logger.addHandler(Keep())
plugin.logger.propagate = False

def state():
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.arg_groups.model_override_base import _MODEL_OVERRIDE_FNS
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    return [
        {NAME!r} in ATTENTION_BACKEND_CHOICES,
        {NAME!r} in ATTENTION_BACKENDS,
        plugin.keep_choice in _MODEL_OVERRIDE_FNS.get(plugin.ARCHITECTURE, []),
        any(isinstance(finder, plugin._PatchingFinder) for finder in sys.meta_path),
    ]

def case(name):
    before = len(records)
    plugin.register()
    out[name] = {{"state": state(), "log": records[before:]}}

out = {{}}
rows, check = seams.SEAMS, seams.check
target = next(row for row in rows if row.name == "DraftBackendFactory._create_backend")
seams.SEAMS = [dataclasses.replace(row, expected=("self", "elsewhere")) if row is target else row for row in rows]
case("mismatch")
seams.SEAMS = rows
def broken(*_):
    raise SyntaxError("unreadable source")
seams.check = broken
case("check raises")
seams.check = check
import os
os.environ["DSV41_SPARSE_DISABLE"] = "maybe"
case("unreadable switch")
del os.environ["DSV41_SPARSE_DISABLE"]

# state() imported the registries, so that what is new below is registration's own.
before = set(sys.modules)
seams.SUPPORTED = ">=0.4,<0.5"
case("untested version")
out["new modules"] = sorted(set(sys.modules) - before)
from sglang.srt.layers.cp.base import CPAttentionBackendKind
out["patched later"] = CPAttentionBackendKind.from_string({NAME!r}).name
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def cases():
    return fresh(FRESH)[0]


@pytest.mark.parametrize(
    "case, reason",
    [
        ("mismatch", "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"),
        ("check raises", "SyntaxError: unreadable source"),
        ("unreadable switch", "DSV41_SPARSE_DISABLE='maybe'"),
    ],
)
def test_refusal_registers_nothing_and_says_what_to_do(cases, case, reason):
    assert cases[case]["state"] == [False] * 4
    [[level, text]] = cases[case]["log"]
    assert level == "ERROR"
    for part in (reason, "NOT registered", "invalid choice", seams.SUPPORTED, seams.installed_version()):
        assert part in text
    assert "Install sglang==0.5.23" in text


def test_untested_version_registers_with_a_warning(cases):
    assert cases["untested version"]["state"] == [True] * 4
    [[level, text]] = cases["untested version"]["log"]
    assert level == "WARNING"
    assert ">=0.4,<0.5" in text and seams.installed_version() in text


def test_registering_imports_no_gpu_library(cases):
    new = {name.split(".")[0] for name in cases["new modules"]}
    assert new <= {"packaging", "sglang_dsv41"}


GPU_LIBRARIES = ("sgl_kernel", "flash_mla", "deep_gemm", "flashinfer")
IMPORTS = f"""
import json, sys
import sglang.srt.plugins
before = set(sys.modules)
from sglang_dsv41 import plugin
plugin.register()
new = set(sys.modules) - before
print(json.dumps({{
    "registered": plugin._registered,
    "gpu": sorted(name for name in new if name.split(".")[0] in {GPU_LIBRARIES!r} + ("triton", "torch")),
    "ours": sorted(name for name in new if name.split(".")[0] == "sglang_dsv41"),
}}))
"""


def test_first_import_and_registration_stay_light():
    seen, _ = fresh(IMPORTS)
    assert seen == {
        "registered": True,
        "gpu": [],
        "ours": ["sglang_dsv41", "sglang_dsv41.envs", "sglang_dsv41.plugin", "sglang_dsv41.seams"],
    }


# ---- places that compare the name ----


def test_module_imported_after_registration_is_patched(cases):
    assert cases["patched later"] == "DSV4"


def test_cp_kind_is_that_of_dsv4():
    from sglang.srt.layers.cp.base import CPAttentionBackendKind as Kind

    assert Kind.from_string(NAME) is Kind.DSV4
    assert Kind.from_string("dsv4") is Kind.DSV4
    assert Kind.from_string("fa3") is Kind.FLASH_ATTENTION
    with pytest.raises(ValueError, match="'unheard-of'"):
        Kind.from_string("unheard-of")


@pytest.mark.parametrize("create", ["create_decode_backend", "create_draft_extend_backend"])
@pytest.mark.parametrize("target, made_by", [(NAME, "dsv4"), ("dsv4", "dsv4"), ("fa3", "fa3")])
def test_draft_keeps_the_stock_backend(monkeypatch, create, target, made_by):
    from sglang.srt.speculative import draft_utils

    monkeypatch.setattr(draft_utils, "attention_backends", lambda: (target, target))
    monkeypatch.setattr(draft_utils, "get_spec", lambda: types.SimpleNamespace(speculative_attention_mode="prefill"))
    monkeypatch.setattr(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper_for_draft_extend", lambda _, made: made
    )
    monkeypatch.setattr(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper_for_draft_decode", lambda _, made: made
    )
    for name in ("dsv4", "fa3"):
        for phase in ("decode", "prefill"):
            monkeypatch.setattr(
                draft_utils.DraftBackendFactory,
                f"_create_{name}_{phase}_backend",
                lambda self, name=name: (name, types.SimpleNamespace(made_by=name, attn_backends=[])),
            )
    runner = types.SimpleNamespace(
        draft_attention_backend=None, model_config=types.SimpleNamespace(hf_config=types.SimpleNamespace())
    )
    made = getattr(draft_utils.DraftBackendFactory(runner, topk=1, speculative_num_steps=2), create)()
    assert made.made_by == made_by
    assert made.decode_attention_backend_str == made_by


def test_draft_maps_refuse_other_names_as_before(monkeypatch):
    from sglang.srt.speculative import draft_utils

    monkeypatch.setattr(draft_utils, "attention_backends", lambda: ("torch_native", NAME))
    factory = object.__new__(draft_utils.DraftBackendFactory)
    factory.draft_attn_backend = None
    with pytest.raises(ValueError, match="no torch_native"):
        factory._create_backend("prefill_attention_backend", {"dsv4": None}, "no {backend_type}")
    # A map without dsv4 gains nothing.
    with pytest.raises(ValueError, match=f"no {NAME}"):
        factory._create_backend("decode_attention_backend", {"fa3": None}, "no {backend_type}")


@pytest.mark.parametrize(
    "prefill, decode, built",
    [
        (NAME, "dsv4", NAME),
        ("dsv4", NAME, NAME),
        (NAME, NAME, NAME),
        ("dsv4", "dsv4", "dsv4"),
        ("fa3", "triton", ["fa3", "triton"]),
        (NAME, "triton", [NAME, "triton"]),
    ],
)
def test_split_phases_are_one_backend_where_stock_is_the_other(monkeypatch, prefill, decode, built):
    # SGLang's hybrid of two backends lacks the calls of DeepSeek-V4 (forward_low_ratio_sources and others).
    from sglang.srt.layers.attention import hybrid_attn_backend
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup as setup

    for name in {prefill, decode}:
        monkeypatch.setitem(setup.ATTENTION_BACKENDS, name, lambda runner, name=name: name)
    monkeypatch.setattr(setup, "attn_backend_wrapper", lambda runner, backend: backend)
    monkeypatch.setattr(
        hybrid_attn_backend,
        "HybridAttnBackend",
        lambda model_runner, decode_backend, prefill_backend: [prefill_backend, decode_backend],
    )
    resolved = setup.ResolvedAttentionBackendStr(prefill=prefill, decode=decode)
    runner = types.SimpleNamespace()
    made = setup._build_resolved_backend(model_runner=runner, resolved=resolved, init_new_workspace=True)
    assert made == built
    assert runner.init_new_workspace is True


def test_kept_choice_is_logged(models, capfd):
    resolve(models / "v41", "--attention-backend", NAME)
    assert f"Keeping --attention-backend {NAME}" in capfd.readouterr().err
