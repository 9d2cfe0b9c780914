"""DSV41_SPARSE_DEBUG: the operation that fails, or writes what it must not, is the one the error names."""

import pytest
import torch

from sglang_dsv41 import envs
from sglang_dsv41.geometry import INT32_MAX
from sglang_dsv41.kernels import kernel_set_class
from sglang_dsv41.kernels.debug import DebugKernels, KernelCheckError
from tests.candidates import SMALL, make_problem, poison

LENGTHS = [0, 1, 9, 64, 65, 300]


def debugged():
    problem = make_problem(LENGTHS)
    poison(problem.rows)
    return problem, DebugKernels(kernel_set_class("reference")(SMALL, problem.buffers))


def step(problem, kernels):
    rows, whole = problem.rows, slice(0, len(LENGTHS))
    slots = torch.full((len(LENGTHS), SMALL.topk + 4), 12345, dtype=torch.int32)
    positions = slots.clone()
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        kernels.publish(logits, rows, tile, slots)
    rows.kernel_metadata = kernels.plan(rows, problem.keys)
    for tile in kernels.passes(len(LENGTHS)):
        logits = kernels.sparse_logits(problem.queries, problem.keys, rows, tile)
        kernels.select_candidates(logits, rows, tile, out_positions=positions, out_slots=slots)
    return positions[whole], slots[whole]


def test_a_good_step_passes_and_is_the_inner_sets():
    problem, kernels = debugged()
    positions, slots = step(problem, kernels)
    plain = make_problem(LENGTHS)
    expected = step(plain, kernel_set_class("reference")(SMALL, plain.buffers))
    assert torch.equal(positions, expected[0]) and torch.equal(slots, expected[1])
    assert kernels.calls["sparse_logits"] == 1 and kernels.calls is kernels.inner.calls


@pytest.mark.parametrize(
    "operation",
    ["dense_logits_tiles", "select_visible", "choose_blocks", "expand", "plan", "sparse_logits", "select_candidates"],
)
def test_an_operation_that_raises_is_named(operation, monkeypatch):
    problem, kernels = debugged()

    def fail(*args, **kwargs):
        raise RuntimeError("an illegal memory access was encountered")
        yield  # a generator where the operation is one

    def fail_at_once(*args, **kwargs):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(kernels.inner, operation, fail if operation == "dense_logits_tiles" else fail_at_once)
    name = "dense_logits" if operation == "dense_logits_tiles" else operation
    with pytest.raises(KernelCheckError, match=rf"{name} of the reference kernels failed: .*illegal memory access"):
        step(problem, kernels)


def spoil_slots(rows, out):
    out[2, 0] = -7


def spoil_count(rows, out):
    out[1, 1] = 3


def spoil_order(rows, out):
    rows.sparse_indices[5, :2] = rows.sparse_indices[5, :2].flip(0)


def spoil_range(rows, out):
    rows.sparse_indices[3, 7] = 99


def spoil_end(rows, out):
    rows.end[5] += 9


def spoil_physical(rows, out):
    rows.physical_blocks[4, 0] = -1


@pytest.mark.parametrize(
    "operation, spoil, message",
    [
        ("select_visible", spoil_slots, "slots out of range in row 2"),
        ("select_visible", spoil_count, "2 slots in row 1 of the tile, which has 1 to give"),
        ("expand", spoil_order, "do not ascend"),
        ("expand", spoil_range, "past a row's visible positions"),
        ("expand", spoil_end, "an end that disagrees"),
        ("expand", spoil_physical, "physical_blocks that disagree"),
    ],
)
def test_a_wrong_output_is_named(operation, spoil, message, monkeypatch):
    problem, kernels = debugged()
    original = getattr(kernels.inner, operation)

    def spoiled(*args, **kwargs):
        original(*args, **kwargs)
        spoil(problem.rows, args[3] if operation == "select_visible" else None)  # out_slots

    monkeypatch.setattr(kernels.inner, operation, spoiled)
    with pytest.raises(KernelCheckError, match=f"{operation} of the reference kernels wrote .*{message}"):
        step(problem, kernels)


def test_a_missing_newest_block_and_nan_are_named(monkeypatch):
    problem, kernels = debugged()
    original = kernels.inner.choose_blocks
    monkeypatch.setattr(
        kernels.inner,
        "choose_blocks",
        lambda *a: torch.where(original(*a) == 37, -1, original(*a)),  # row 5's newest
    )
    with pytest.raises(KernelCheckError, match="choose_blocks of the reference kernels wrote no newest block in row 5"):
        step(problem, kernels)
    problem, kernels = debugged()
    problem.queries.q[4] = float("nan")
    with pytest.raises(KernelCheckError, match="sparse_logits of the reference kernels wrote NaN in row 4"):
        step(problem, kernels)


def test_the_switch(monkeypatch):
    for value, expected in (("", False), ("0", False), ("1", True), ("on", True)):
        monkeypatch.setenv(envs.DEBUG, value)
        assert envs.debug() is expected
    monkeypatch.setenv(envs.DEBUG, "maybe")
    with pytest.raises(ValueError, match="DSV41_SPARSE_DEBUG='maybe'"):
        envs.debug()
    assert INT32_MAX == 2**31 - 1
