"""`dsv41-sparse doctor`: each thing that would stop a start, and what it says to do."""

import importlib.metadata
import json

import pytest

pytest.importorskip("sglang")
import torch

from sglang_dsv41 import doctor, envs, models, requirements, seams
from sglang_dsv41.doctor import FAIL, OK, UNCHECKED
from sglang_dsv41.kernels import KERNEL_SETS
from sglang_dsv41.kernels.hopper import ops


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("DSV41_SPARSE_DISABLE", "DSV41_SPARSE_KERNELS", "DSV41_SPARSE_SCRATCH_MB", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hopper(monkeypatch):
    pretend_gpu(monkeypatch, (9, 0), "NVIDIA H200")
    monkeypatch.setattr(ops, "module", lambda: None)


def no_compiler():
    raise RuntimeError("no nvcc")


@pytest.fixture
def model(tmp_path):
    return models.write_model(tmp_path / "model")


def pretend_gpu(monkeypatch, capability, name="NVIDIA GPU", **facts):
    # Not through torch.cuda.is_available: SGLang would remember a GPU that is not there.
    facts |= {"capability": capability, "deepgemm_error": requirements.deepgemm_error(capability)}
    monkeypatch.setattr(requirements, "device_facts", lambda: facts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: name)


def pretend_version(monkeypatch, package, version):
    """`package` has this version; None: it is not installed."""
    real = importlib.metadata.version

    def fake(name):
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", fake)


def named(checks, what):
    found = [check for check in checks if check.what == what]
    assert len(found) == 1, f"{what}: {checks}"
    return found[0]


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"].update(changes)
    path.write_text(json.dumps(config))


def assert_failed(check, *, found, needed, change):
    assert check.status == FAIL
    assert found in check.found and needed in check.needed and change in check.change, check


# ---- a set-up that works ----


def test_all_ok_on_hopper(hopper, model, capsys):
    assert doctor.main(["--model-path", str(model)]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert "1 x NVIDIA H200, compute capability 9.0, kernel set hopper" in out
    assert "layers [8, 9, 10, 11] score 2048 blocks of 8 positions" in out
    assert out.endswith(f"It will work: --model-path {model} --attention-backend dsv41-sparse\n")


@pytest.mark.parametrize("with_model", [False, True])
def test_says_why_other_kernels_serve(hopper, with_model, model, monkeypatch, capsys):
    monkeypatch.setattr(ops, "module", no_compiler)
    assert doctor.main(["--model-path", str(model)] if with_model else []) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "GPU:" in line)
    assert "kernel set portable" in line and "hopper kernels cannot be had" in line and "no nvcc" in line


def test_kernels_asked_for_that_cannot_be_had(hopper, monkeypatch, capsys):
    monkeypatch.setattr(ops, "module", no_compiler)
    monkeypatch.setenv("DSV41_SPARSE_KERNELS", "hopper")
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "the hopper kernels cannot be had: " in out and "no nvcc" in out and "unset DSV41_SPARSE_KERNELS" in out


def test_without_a_model_it_is_not_checked(hopper, capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "not checked  model: no --model-path given" in out and "It will work" not in out


def test_json_has_every_check(hopper, model, capsys):
    assert doctor.main(["--json", "--model-path", str(model)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {check["status"] for check in report["checks"]} == {OK, UNCHECKED}
    assert [check["what"] for check in report["checks"] if check["status"] == UNCHECKED] == ["server arguments"]


def test_json_of_a_failure(monkeypatch, model, capsys):
    pretend_gpu(monkeypatch, (7, 5))
    assert doctor.main(["--json", "--model-path", str(model)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [check["what"] for check in report["checks"] if check["status"] == FAIL] == ["GPU"]


def test_a_failure_prints_found_needed_and_change(monkeypatch, capsys):
    pretend_gpu(monkeypatch, (7, 5))
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("FAIL"))
    assert lines[at] == "FAIL         GPU: compute capability 7.5"
    assert lines[at + 1].strip().startswith("needed: an NVIDIA GPU of compute capability 8.0")
    assert lines[at + 2].strip().startswith("change: Run on an H100")
    assert lines[-1] == "It will not work: 1 of these lines failed (GPU)."


# ---- installation ----


def test_python_too_old(monkeypatch):
    monkeypatch.setattr(doctor, "SGLANG_PYTHON", (9, 9))
    assert_failed(doctor.check_python(), found="3.", needed="9.9 or newer", change="newer Python")


def test_sglang_missing(monkeypatch):
    pretend_version(monkeypatch, "sglang", None)
    assert_failed(doctor.check_sglang(), found="not installed", needed="sglang>=0.5.23", change="pip install")
    assert doctor.check_seams()[0].status == UNCHECKED


def test_sglang_of_another_version_is_untested(monkeypatch):
    pretend_version(monkeypatch, "sglang", "0.6.1")
    check = doctor.check_sglang()
    assert check.status == UNCHECKED and "0.6.1" in check.found and seams.SUPPORTED in check.needed


@pytest.mark.parametrize("name", doctor.LIBRARIES)
def test_library_missing(monkeypatch, name):
    pretend_version(monkeypatch, name, None)
    assert_failed(doctor.check_library(name), found="not installed", needed=name, change="pip install")


def test_library_off_sglangs_pin_is_untested(monkeypatch):
    pretend_version(monkeypatch, "sgl-deep-gemm", "0.0.1")
    check = doctor.check_library("sgl-deep-gemm")
    assert check.status == UNCHECKED and check.found.startswith("0.0.1")
    assert check.needed == "sgl-deep-gemm==0.2.3.post2" and check.needed in check.change


def test_libraries_of_this_environment():
    assert [check.status for check in map(doctor.check_library, doctor.LIBRARIES)] == [OK] * len(doctor.LIBRARIES)


# ---- plugin ----


def test_plugin_not_installed(monkeypatch):
    none = importlib.metadata.EntryPoints(())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: none)
    (check,) = doctor.check_plugin()
    assert_failed(check, found="no entry point", needed="installed sglang-dsv41", change="pip install -e .")


def test_plugin_left_out_of_the_list(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    check = named(doctor.check_plugin(), "plugin list")
    assert_failed(check, found="other, another", needed="dsv41_sparse", change="another,other,dsv41_sparse")


def test_plugin_in_the_list(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other, dsv41_sparse")
    assert [check.status for check in doctor.check_plugin()] == [OK]


@pytest.mark.parametrize("value", ["1", "perhaps"])
def test_off_switch(monkeypatch, value):
    monkeypatch.setenv("DSV41_SPARSE_DISABLE", value)
    check = named(doctor.check_environment(), "off switch")
    assert_failed(check, found=value, needed="0 or unset", change="unset DSV41_SPARSE_DISABLE")


def test_seam_mismatches_are_named_one_by_one(monkeypatch):
    wrong = [
        seams.Mismatch("sglang.a.b", "the name", "no such name"),
        seams.Mismatch("sglang.c", "x", "no such module"),
    ]
    monkeypatch.setattr(seams, "check", lambda: wrong)
    first, second = doctor.check_seams()
    assert_failed(first, found="sglang.a.b: no such name", needed="the name", change="sglang==0.5.23")
    assert "sglang.c" in second.found


# ---- device ----


def test_no_gpu(monkeypatch):
    pretend_gpu(monkeypatch, None)
    check = named(doctor.check_requirements(None), "GPU")
    assert_failed(check, found="no CUDA device", needed="compute capability 8.0", change="H200")


def test_no_gpu_but_a_forced_kernel_set(monkeypatch):
    pretend_gpu(monkeypatch, None)
    monkeypatch.setenv("DSV41_SPARSE_KERNELS", "reference")
    check = named(doctor.check_requirements(None), "GPU")
    assert_failed(check, found="no CUDA device", needed="NVIDIA GPU", change="dsv41-sparse try")


def test_amd_gpu(monkeypatch):
    pretend_gpu(monkeypatch, (9, 4), platform="hip")
    assert_failed(named(doctor.check_requirements(None), "GPU"), found="hip", needed="NVIDIA", change="H200")


def test_unknown_kernel_set(hopper, monkeypatch):
    monkeypatch.setenv("DSV41_SPARSE_KERNELS", "fast")
    check = named(doctor.check_requirements(None), "kernel set")
    assert_failed(check, found="fast", needed=next(iter(KERNEL_SETS)), change="unset DSV41_SPARSE_KERNELS")


def test_sm100_without_deepgemms_kernels(monkeypatch):
    monkeypatch.setattr(requirements, "deepgemm_error", lambda capability: "a DeepGEMM without them")
    pretend_gpu(monkeypatch, (10, 0))
    check = named(doctor.check_requirements(None), "DeepGEMM")
    assert_failed(check, found="without them", needed="SM100", change="sgl-deep-gemm")


# ---- model ----


def test_model_path_that_is_nothing(hopper, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check = named(doctor.check_requirements(str(tmp_path / "absent")), "model config")
    assert_failed(check, found="absent", needed="config.json", change="path")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_model_config_that_cannot_be_read(hopper, tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    check = named(doctor.check_requirements(str(tmp_path)), "model config")
    assert_failed(check, found=str(tmp_path), needed="config.json", change="path")


def test_another_model(hopper, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    check = named(doctor.check_requirements(str(tmp_path)), "model")
    assert_failed(check, found="llama", needed="deepseek_v41", change="DeepSeek-V4.1")


def test_model_without_candidate_blocks(hopper, model):
    edit_config(model, candidate_topk_blocks=0)
    check = named(doctor.check_requirements(str(model)), "candidate blocks")
    assert_failed(check, found="candidate_topk_blocks=0", needed="candidate_block_size", change="config.json")


@pytest.mark.parametrize(
    "what, changes, found",
    [
        ("index heads", {"index_n_heads": 24}, "24"),
        ("candidate columns", {"candidate_topk_blocks": 4096}, "32768 columns"),
        ("index top-k", {"index_topk": 4096}, "4096"),
        ("candidate blocks", {"candidate_block_size": 12}, "12"),
    ],
)
def test_model_past_a_limit(hopper, model, what, changes, found):
    edit_config(model, **changes)
    check = named(doctor.check_requirements(str(model)), what)
    assert_failed(check, found=found, needed="", change="checkpoint")


def test_model_config_that_sglang_cannot_read(hopper, model, monkeypatch):
    from sglang.srt.utils import hf_transformers_utils

    def get_config(*args, **kwargs):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(hf_transformers_utils, "get_config", get_config)
    checks = doctor.check_requirements(str(model))
    assert "SGLang could not (RuntimeError: no such thing)" in named(checks, "model").found
    assert named(checks, "candidate blocks").status == OK


def test_all_failures_are_reported_together(monkeypatch, model, capsys):
    pretend_gpu(monkeypatch, (7, 5))
    monkeypatch.setenv("DSV41_SPARSE_DISABLE", "1")
    edit_config(model, index_topk=4096)
    assert doctor.main(["--model-path", str(model)]) == 1
    assert "3 of these lines failed (off switch, GPU, index top-k)" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in envs.NAMES if name not in (envs.DISABLE, envs.KERNELS)])
def test_every_unreadable_variable_is_named(monkeypatch, name):
    """Each would end the start."""
    monkeypatch.setenv(name, "lots")
    check = named(doctor.check_environment(), "environment variable")
    assert check.status == doctor.FAIL and f"{name}='lots'" in check.found and check.change == f"unset {name}"
