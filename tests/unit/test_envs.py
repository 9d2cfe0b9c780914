"""The environment variables: values, defaults and errors."""

import pytest

from sglang_dsv41 import envs


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in envs.NAMES:
        monkeypatch.delenv(name, raising=False)


def test_names_are_the_documented_ones():
    assert envs.NAMES == (
        "DSV41_SPARSE_DISABLE",
        "DSV41_SPARSE_KERNELS",
        "DSV41_SPARSE_SCRATCH_MB",
        "DSV41_SPARSE_DEBUG",
        "DSV41_SPARSE_DENSE_EXTEND",
        "DSV41_SPARSE_EXTEND_MB",
        "DSV41_SPARSE_SHORT_GRAPHS",
        "DSV41_SPARSE_AUDIT",
    )


def test_defaults():
    assert envs.disabled() is False
    assert envs.forced_kernels() is None
    assert envs.scratch_bytes() == 256 * 2**20
    assert envs.debug() is False
    assert envs.dense_extend() is False
    assert envs.short_graphs() is False
    assert envs.audit_rate() == 0


@pytest.mark.parametrize(
    "value,expected",
    [("1", True), ("true", True), (" YES ", True), ("on", True)]
    + [("0", False), ("false", False), ("No", False), ("off", False), ("", False), ("  ", False)],
)
def test_disable_values(monkeypatch, value, expected):
    monkeypatch.setenv(envs.DISABLE, value)
    assert envs.disabled() is expected


@pytest.mark.parametrize("value,expected", [("0", False), ("off", False), ("1", True), ("", False), (" ", False)])
@pytest.mark.parametrize(
    "name,read",
    [(envs.SHORT_GRAPHS, envs.short_graphs), (envs.DEBUG, envs.debug), (envs.DENSE_EXTEND, envs.dense_extend)],
)
def test_switches_are_off_unless_set(monkeypatch, name, read, value, expected):
    monkeypatch.setenv(name, value)
    assert read() is expected


@pytest.mark.parametrize("value", ["2", "maybe", "-1"])
def test_unreadable_disable_raises(monkeypatch, value):
    monkeypatch.setenv(envs.DISABLE, value)
    with pytest.raises(ValueError, match=f"DSV41_SPARSE_DISABLE='{value}' is neither true nor false; set it to 1 or 0"):
        envs.disabled()


@pytest.mark.parametrize(
    "value,expected", [("portable", "portable"), (" blackwell ", "blackwell"), ("", None), (" ", None)]
)
def test_forced_kernels(monkeypatch, value, expected):
    monkeypatch.setenv(envs.KERNELS, value)
    assert envs.forced_kernels() == expected


@pytest.mark.parametrize("value,expected", [("1", 2**20), (" 64 ", 64 * 2**20), ("4096", 2**32), ("", 256 * 2**20)])
def test_scratch_values(monkeypatch, value, expected):
    monkeypatch.setenv(envs.SCRATCH_MB, value)
    assert envs.scratch_bytes() == expected


def test_extend_budget(monkeypatch):
    monkeypatch.delenv(envs.EXTEND_MB, raising=False)
    assert envs.extend_bytes() == 1 << 30
    monkeypatch.setenv(envs.EXTEND_MB, "16")
    assert envs.extend_bytes() == 16 << 20
    monkeypatch.setenv(envs.EXTEND_MB, "a lot")
    with pytest.raises(ValueError, match="DSV41_SPARSE_EXTEND_MB='a lot' is not .*; for example .*_EXTEND_MB=1024"):
        envs.extend_bytes()


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "256MB", "lots"])
def test_bad_scratch_raises(monkeypatch, value):
    monkeypatch.setenv(envs.SCRATCH_MB, value)
    with pytest.raises(
        ValueError, match="is not a positive whole number of MiB; for example DSV41_SPARSE_SCRATCH_MB=256"
    ) as e:
        envs.scratch_bytes()
    assert repr(value) in str(e.value)


@pytest.mark.parametrize("value,expected", [("0", 0), ("", 0), (" 0.001 ", 0.001), ("1e-4", 1e-4), ("1", 1)])
def test_audit_rates(monkeypatch, value, expected):
    monkeypatch.setenv(envs.AUDIT, value)
    assert envs.audit_rate() == expected


@pytest.mark.parametrize("value", ["1.5", "-0.1", "10%", "nan", "inf", "on"])
def test_bad_audit_rate_raises(monkeypatch, value):
    monkeypatch.setenv(envs.AUDIT, value)
    with pytest.raises(ValueError, match=r"is not a share of rows from 0 \(off\) to 1; for example .*=0.001") as e:
        envs.audit_rate()
    assert f"DSV41_SPARSE_AUDIT={value!r}" in str(e.value)


def test_a_change_is_seen_at_the_next_read(monkeypatch):
    """Nothing is cached: a spawned process, or a test, may set them late."""
    monkeypatch.setenv(envs.KERNELS, "reference")
    assert envs.forced_kernels() == "reference"
    monkeypatch.setenv(envs.KERNELS, "portable")
    assert envs.forced_kernels() == "portable"
