"""Which kernel set serves: the Hopper one on 9.0, the portable one in its place with one warning, or an error."""

import dataclasses
import logging

import pytest

from sglang_dsv41 import envs
from sglang_dsv41.kernels import kernel_set_class, kernel_set_name, make_kernel_set
from sglang_dsv41.kernels.hopper import HopperKernels, ops
from sglang_dsv41.kernels.portable import PortableKernels
from sglang_dsv41.requirements import EngineFacts, unmet
from sglang_dsv41.rows import RowBuffers
from tests.candidates import RELEASED


class Build:
    """Stands in for ``ops.module``: raises ``error``, or gives kernels; counts how often it was asked."""

    def __init__(self, error=None):
        self.error, self.asked = error, 0

    def __call__(self):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return object()


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch):
    monkeypatch.delenv(envs.KERNELS, raising=False)


@pytest.fixture
def build(monkeypatch):
    """Sets what the build of the CUDA code gives."""

    def give(error=None):
        made = Build(error)
        monkeypatch.setattr(ops, "module", made)
        return made

    return give


def make(name, geometry=RELEASED):
    limits = {"max_rows": 2, "scratch_bytes": 1, "max_context": 64, "dense_rows": 2, "device": "cpu"}
    return make_kernel_set(name, geometry, RowBuffers(geometry, **limits))


def warnings(caplog):
    return [
        r.getMessage() for r in caplog.records if r.name.startswith("sglang_dsv41") and r.levelno >= logging.WARNING
    ]


def test_capability_9_0_leads_to_the_hopper_kernels():
    assert kernel_set_class(kernel_set_name((9, 0))) is HopperKernels
    assert issubclass(HopperKernels, PortableKernels) and kernel_set_class(HopperKernels.fallback) is PortableKernels


@pytest.mark.parametrize("forced", [None, "hopper"])
def test_a_good_machine_gets_them(forced, build, monkeypatch, caplog):
    """Built once, when the set is made; the constructor runs with buffers of the CPU too."""
    if forced:
        monkeypatch.setenv(envs.KERNELS, forced)
    good = build()
    kernels = make("hopper")
    assert type(kernels) is HopperKernels and kernels.name == "hopper"
    assert good.asked == 1 and not warnings(caplog)


# error of the build, geometry, and what the reason says
CANNOT = {
    "no compiler": (
        RuntimeError("no nvcc"),
        RELEASED,
        "its CUDA code could not be built (RuntimeError: no nvcc)",
    ),
    "no SGLang JIT": (
        ImportError("cannot import load_jit"),
        RELEASED,
        "its CUDA code could not be built (ImportError: cannot import load_jit)",
    ),
    "128 heads": (
        None,
        dataclasses.replace(RELEASED, heads=128),
        "its scoring kernel takes at most 64 index heads, the model has 128",
    ),
}


@pytest.mark.parametrize("error,geometry,reason", CANNOT.values(), ids=CANNOT)
def test_the_portable_kernels_take_their_place(error, geometry, reason, build, caplog):
    asked = build(error)
    kernels = make("hopper", geometry)
    assert type(kernels) is PortableKernels and kernels.geometry is geometry
    assert warnings(caplog) == [f"dsv41-sparse: the hopper kernels cannot be had, so the portable ones serve: {reason}"]
    assert asked.asked == (error is not None), "code that no kernel would run is not built"


@pytest.mark.parametrize("error,geometry,reason", CANNOT.values(), ids=CANNOT)
def test_a_forced_set_is_not_replaced(error, geometry, reason, build, monkeypatch, caplog):
    monkeypatch.setenv(envs.KERNELS, "hopper")
    build(error)
    with pytest.raises(RuntimeError) as raised:
        make("hopper", geometry)
    assert f"the hopper kernels cannot be had: {reason}. Unset DSV41_SPARSE_KERNELS." in str(raised.value)
    assert not warnings(caplog)


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_heads_that_the_scoring_kernel_takes(heads, build):
    build()
    assert HopperKernels.unmet(dataclasses.replace(RELEASED, heads=heads)) is None


@pytest.mark.parametrize(
    "capability,found",
    [
        ((8, 0), "compute capability 8.0"),
        ((10, 0), "compute capability 10.0"),
        ((12, 0), "compute capability 12.0"),
        (None, "no CUDA device"),
    ],
)
def test_hopper_forced_elsewhere_is_an_unmet_requirement(capability, found):
    facts = EngineFacts(
        model_type="deepseek_v41_text",
        geometry=RELEASED,
        capability=capability,
        deepgemm_error="a DeepGEMM without them",  # does not matter: that set is not asked for
        forced_kernels="hopper",
    )
    (failure,) = unmet(facts)
    assert failure.what == "GPU" and failure.found == found
    assert "compute capability 9.0" in failure.needed and "Unset DSV41_SPARSE_KERNELS" in failure.change
    assert unmet(dataclasses.replace(facts, capability=(9, 0))) == []


@pytest.mark.parametrize("name", ["reference", "portable", "blackwell"])
def test_the_other_sets_have_no_substitute(name):
    kernels = kernel_set_class(name)
    assert kernels.unmet(RELEASED) is None and kernels.fallback is None
