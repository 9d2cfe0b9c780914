"""Random geometries, lengths, groups, pages, scales and block lists against the loop oracle, and random configs and engines
against the requirements; hypothesis shrinks what fails.

A short run by default; `DSV41_FUZZ_EXAMPLES=2000 pytest tests/unit/test_fuzz.py` runs longer. The portable set runs under
Triton's interpreter where there is no GPU.
"""

import dataclasses
import os
import types

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis (pip install hypothesis)")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_dsv41 import requirements
from sglang_dsv41.geometry import INT32_MAX, CandidateGeometry, GeometryError
from sglang_dsv41.kernels import KERNEL_SETS, kernel_set_class
from sglang_dsv41.kernels.debug import DebugKernels
from sglang_dsv41.rows import RowBuffers
from tests.candidates import RELEASED, assert_selection, make_problem, oracle_blocks, poison, slot_of, visible_in
from tests.devices import KERNELS_ON, device_of

# Scales up to 2^127 overflow, as they are meant to.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in matmul")
EXAMPLES = int(os.environ.get("DSV41_FUZZ_EXAMPLES", "12"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="DSV41_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
# A config costs next to nothing beside a step.
fuzz_configs = settings(fuzz, max_examples=25 * EXAMPLES)
INT32_MIN = -(2**31)
LARGEST = torch.finfo(torch.float32).max
# Exponents of the keys' scales: the model's, the smallest, one, the largest, and all.
SCALES = {"usual": (120, 130), "0": (0, 0), "127": (127, 127), "254": (254, 254), "any": (0, 254)}
WEIGHTS = {
    "signed": lambda w: w,
    "zero": torch.zeros_like,
    "negative": lambda w: -w.abs(),
    "positive": torch.abs,
}


# ---- steps ----


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A step: its requests as (first token position, rows), and what they are made of."""

    geometry: CandidateGeometry
    ratio: int
    groups: list[tuple[int, int]]
    padded: int
    scales: str
    weights: str
    debug: bool
    options: dict

    @property
    def tokens(self) -> list[int]:
        return [first + i for first, count in self.groups for i in range(count)] + [-1] * self.padded

    @property
    def requests(self) -> list[int]:
        return [i + 1 for i, (_, count) in enumerate(self.groups) for _ in range(count)] + [0] * self.padded

    @property
    def lens(self) -> list[int]:
        return [(token + 1) // self.ratio for token in self.tokens]


@st.composite
def steps(draw):
    block_size = draw(st.sampled_from([8, 16, 24, 32, 40]))
    topk_blocks = draw(st.integers(1, 12))
    geometry = CandidateGeometry(
        topk_blocks=topk_blocks,
        block_size=block_size,
        topk=draw(st.integers(1, min(48, topk_blocks * block_size))),
        heads=draw(st.sampled_from([16, 32])),
    )
    page_slots, ratio = draw(st.sampled_from([64, 128])), draw(st.sampled_from([1, 2]))
    edges = [0, 1, block_size - 1, block_size, block_size + 1, page_slots - 1, page_slots, page_slots + 1]
    length = st.one_of(st.sampled_from(edges), st.integers(0, 420))
    # A request of one row decodes, one of more verifies.
    most = draw(st.sampled_from([1, 8]))
    groups = draw(
        st.lists(
            st.tuples(length.map(lambda n: n * ratio - 1), st.integers(1, most)),
            min_size=1,
            max_size=5 if most == 1 else 2,
        )
    )
    scales = draw(st.sampled_from(list(SCALES)))
    return Drawn(
        geometry=geometry,
        ratio=ratio,
        groups=groups,
        padded=draw(st.integers(0, 2)),
        scales=scales,
        weights=draw(st.sampled_from(list(WEIGHTS))),
        # The checks of the debug set must not find fault with a right step; an overflow they may report.
        debug=draw(st.booleans()) and scales in ("usual", "127"),
        options=dict(
            seed=draw(st.integers(0, 1000)),
            page_slots=page_slots,
            table_slots=page_slots * draw(st.sampled_from([1, 2])),
            scratch_bytes=draw(st.sampled_from([1, 64 << 20])),
            page_stride=draw(st.sampled_from([None, page_slots * 68 + 60])),
        ),
    )


def build(kernels_on, drawn: Drawn):
    """(poisoned problem, kernels); rows of a request share its page-table line, padded rows hold poisoned positions."""
    device, requests = device_of(kernels_on), drawn.requests
    problem = make_problem(drawn.lens, drawn.geometry, device=device, exponents=SCALES[drawn.scales], **drawn.options)
    problem.queries = dataclasses.replace(problem.queries, weights=WEIGHTS[drawn.weights](problem.queries.weights))
    table = problem.rows.block_table[[requests.index(request) for request in requests]]
    live = len(drawn.tokens) - drawn.padded
    tokens = drawn.tokens[:live] + [-1, -77777][: drawn.padded]
    problem.rows = problem.buffers.rows(
        torch.tensor(tokens, device=device),
        ratio=drawn.ratio,
        block_table=table.contiguous(),
        table_slots=drawn.options["table_slots"],
        request_rows=torch.tensor(requests, device=device),
        is_verify=any(count > 1 for _, count in drawn.groups),
    )
    assert problem.lens == drawn.lens
    poison(problem.rows)
    kernels = kernel_set_class(kernels_on.split("-")[0])(drawn.geometry, problem.buffers)
    return problem, DebugKernels(kernels) if drawn.debug else kernels


def ranked(logits: torch.Tensor) -> torch.Tensor:
    """Logits as they are compared: NaN and -inf after every number, +inf before."""
    return logits.float().cpu().nan_to_num(nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST)


def out_of(problem, extra=3):
    rows, width = problem.rows, problem.geometry.topk + extra
    return torch.full((rows.num_rows, width), 12345, dtype=torch.int32, device=rows.lens.device)


@pytest.mark.parametrize("kernels_on", KERNELS_ON)
@given(steps())
@fuzz
def test_a_whole_step(kernels_on, drawn):
    """Dense pass, block choice, expansion, sparse pass and selection of one step."""
    problem, kernels = build(kernels_on, drawn)
    geometry, rows, lens = problem.geometry, problem.rows, drawn.lens
    slots, dense = out_of(problem), {}
    positions = slots.clone()
    for tile, logits in kernels.dense_logits_tiles(problem.queries, problem.keys, rows):
        kernels.select_visible(logits, rows, tile, slots)
        blocks = kernels.choose_blocks(logits, rows, tile)
        kernels.expand(blocks, rows, tile)
        for row in range(tile.start, tile.stop):
            dense[row] = logits[row - tile.start, : lens[row]].cpu().clone()
            if comparable(dense[row], kernels_on):
                check_blocks(blocks[row - tile.start].tolist(), ranked(dense[row]), geometry)
    for row, length in enumerate(lens):
        own = [slot_of(rows, row, p) for p in range(length)]
        if comparable(dense[row], kernels_on):
            assert_selection(
                slots[row].tolist(), dict(zip(own, ranked(dense[row]).tolist())), geometry.topk, tolerance=0
            )
        assert set(slots[row].tolist()) <= {-1, *own}
    slots.fill_(12345)
    for tile in kernels.passes(len(lens)):
        logits = kernels.sparse_logits(problem.queries, problem.keys, rows, tile)
        kernels.select_candidates(logits, rows, tile, out_positions=positions, out_slots=slots)
        for row in range(tile.start, tile.stop):
            check_row(problem, row, logits[row - tile.start].cpu(), dense[row], positions, slots, kernels_on)


def comparable(logits, kernels_on) -> bool:
    """Whether a row's picks are held to its scores: SGLang's top-k kernels on a GPU promise nothing for NaN and inf."""
    return kernels_on.endswith("cpu") or bool(logits.isfinite().all())


def check_blocks(blocks, scores, geometry):
    chosen = [b for b in blocks if b != -1]
    size, count = geometry.block_size, -(-len(scores) // geometry.block_size)
    assert len(chosen) == len(set(chosen)) == min(count, geometry.topk_blocks)
    if count:
        assert count - 1 in chosen
        best = {b: float(scores[b * size :][:size].max()) for b in range(count)}
        assert sorted(best[b] for b in chosen) == sorted(best[b] for b in oracle_blocks(scores, geometry))


def check_row(problem, row, logits, dense, positions, slots, kernels_on):
    """A row's schedule is its blocks' positions in order, its logits are the dense ones, its picks their top."""
    rows, geometry = problem.rows, problem.geometry
    listed = [b for b in rows.sparse_indices[row].tolist() if b != INT32_MAX]
    candidates = visible_in(listed, len(dense), geometry.kernel_block)
    assert listed == sorted(set(listed)) and int(rows.end[row]) == len(candidates)
    ours, theirs = logits[: len(candidates)], dense[candidates].to(torch.bfloat16)
    # What overflows does so by the order of the sum, which is torch's in the reference.
    same = (
        ours.isfinite() & theirs.isfinite() if kernels_on.startswith("reference") else ~ours.isnan() & ~theirs.isnan()
    )
    assert torch.equal(ours[same].view(torch.int16), theirs[same].view(torch.int16))
    if comparable(dense, kernels_on):
        assert kernels_on.startswith("reference") or torch.equal(ours.isnan(), theirs.isnan())
        scores = dict(zip(candidates, ranked(ours).tolist()))
        assert_selection(positions[row].tolist(), scores, geometry.topk, tolerance=0)
    assert set(positions[row].tolist()) <= {-1, *candidates}
    expected = [-1 if p == -1 else slot_of(rows, row, p) for p in positions[row].tolist()]
    assert slots[row].tolist() == expected


# ---- what is not well formed ----


@pytest.mark.parametrize("kernels_on", KERNELS_ON)
@given(steps(), st.data())
@fuzz
def test_expansion_of_any_block_list(kernels_on, drawn, data):
    """Block ids of any kind in any order: what is visible is kept, once, ascending; the rest is dropped."""
    problem, kernels = build(kernels_on, drawn)
    geometry, rows, lens = problem.geometry, problem.rows, drawn.lens
    size = geometry.block_size
    ids = st.one_of(
        st.integers(-3, max(lens) // size + 3), st.sampled_from([INT32_MIN, -(2**28), 2**27, 2**28, 2**30, INT32_MAX])
    )
    lists = [data.draw(st.lists(ids, unique=True, max_size=geometry.topk_blocks)) for _ in lens]
    width = max(1, max(map(len, lists)))
    blocks = torch.tensor([one + [-1] * (width - len(one)) for one in lists], dtype=torch.int32)
    kernels.expand(blocks.to(rows.lens.device), rows, slice(0, len(lens)))
    for row, (length, one) in enumerate(zip(lens, lists)):
        kept = sorted(b for b in one if 0 <= b < -(-length // size))
        expected = visible_in(kept, length, size)
        listed = [b for b in rows.sparse_indices[row].tolist() if b != INT32_MAX]
        assert visible_in(listed, length, geometry.kernel_block) == expected and int(rows.end[row]) == len(expected)
        physical = rows.physical_blocks[row].tolist()
        at = [slot_of(rows, row, b * geometry.kernel_block) // geometry.kernel_block for b in listed]
        assert physical == at + [-1] * (len(physical) - len(at))


@pytest.mark.parametrize("kernels_on", KERNELS_ON)
@given(steps(), st.data())
@fuzz
def test_a_step_over_malformed_pages(kernels_on, drawn, data):
    """Page ids that are negative, past the pool or too large to name a slot: nothing is read there, and no output names
    a slot that the pool does not have; the rest of a row is selected as ever."""
    drawn = dataclasses.replace(drawn, debug=False, scales="usual", weights="positive")
    problem, kernels = build(kernels_on, drawn)
    geometry, rows, keys = problem.geometry, problem.rows, problem.keys
    per, pool_slots = rows.table_slots, keys.pool.shape[0] * keys.page_slots
    rows.pool_slots = pool_slots
    bad = st.sampled_from([-1, -7, INT32_MIN, pool_slots // per, 2**24, 2**25 + 1, 2**28, 2**30, INT32_MAX])
    # All rows of a request have its line.
    for request in set(drawn.requests):
        where = [i for i, one in enumerate(drawn.requests) if one == request]
        for entry in data.draw(st.lists(st.integers(0, rows.block_table.shape[1] - 1), max_size=4)):
            rows.block_table[where, entry] = data.draw(bad)
    slots, dense = out_of(problem), {}
    for tile, logits in kernels.dense_logits_tiles(problem.queries, keys, rows):
        kernels.select_visible(logits, rows, tile, slots)
        kernels.expand(kernels.choose_blocks(logits, rows, tile), rows, tile)
        dense.update({row: logits[row - tile.start].float().cpu() for row in range(tile.start, tile.stop)})
    outs = [(slots, [range(length) for length in drawn.lens])]
    positions, slots = out_of(problem), out_of(problem)
    for tile in kernels.passes(len(drawn.lens)):
        logits = kernels.sparse_logits(problem.queries, keys, rows, tile)
        kernels.select_candidates(logits, rows, tile, out_positions=positions, out_slots=slots)
    listed = [[b for b in ids if b != INT32_MAX] for ids in rows.sparse_indices.tolist()]
    outs.append((slots, [visible_in(b, n, geometry.kernel_block) for b, n in zip(listed, drawn.lens)]))
    for row, length in enumerate(drawn.lens):
        inside = {p: slot_of(rows, row, p) for p in range(length) if rows.block_table[row, p // per] >= 0}
        inside = {p: slot for p, slot in inside.items() if slot < pool_slots}
        assert all(dense[row][p].isfinite() == (p in inside) for p in range(length))
        for out, reach in outs:
            picks, there = [slot for slot in out[row].tolist() if slot != -1], inside.keys() & set(reach[row])
            assert set(picks) <= {inside[p] for p in there}
            assert len(picks) == len(set(picks)) == min(geometry.topk, len(there))
        assert set(positions[row].tolist()) <= {-1, *outs[1][1][row]}


# ---- configs and engines ----

NUMBERS = st.one_of(st.integers(-9, 40), st.sampled_from([8, 16, 20, 32, 128, 512, 2048, 2**31, 2**70]))
JUNK = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["8", "2048", b"8", {}, {"a": 1}, object()]),
)
LISTS = st.one_of(st.lists(NUMBERS, max_size=12), st.lists(JUNK, max_size=4), JUNK)
CONFIG = dict(
    model_type="deepseek_v41",
    compress_ratios=[0, 0] + [2] * 18 + [1] * 20,
    kv_source_layer_ids=[2, 8, 14, 20],
    index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    index_topk=512,
    index_n_heads=32,
    index_head_dim=128,
)


@given(st.data())
@fuzz_configs
def test_any_config_gives_a_geometry_or_a_message(data):
    """One to all fields of a released config replaced by anything: a geometry that the kernels can take, or a refusal that
    says what to change; never another exception."""
    fields = data.draw(st.lists(st.sampled_from(sorted(CONFIG)), min_size=1, max_size=4, unique=True))
    changes = {name: data.draw(LISTS if isinstance(CONFIG[name], list) else JUNK, label=name) for name in fields}
    facts = requirements.EngineFacts(
        capability=(9, 0), **requirements.model_facts(types.SimpleNamespace(**{**CONFIG, **changes}))
    )
    failures = requirements.unmet(facts)
    if failures:
        message = str(requirements.RequirementsError(failures))
        assert all(one.found and one.needed and one.change and str(one) in message for one in failures)
        return
    geometry = facts.geometry
    assert all(type(value) is int for value in dataclasses.astuple(geometry)[:-1]) and geometry.ratio in (1, 2)
    assert 16 <= geometry.heads <= 128 and geometry.topk <= geometry.columns <= 16384
    assert geometry.expansion * geometry.kernel_block == geometry.block_size
    assert RowBuffers(geometry, max_rows=2, scratch_bytes=1, max_context=64, dense_rows=2, device="meta").nbytes > 0


@given(st.data())
@fuzz_configs
def test_any_engine_is_served_or_refused_with_a_message(data):
    """Facts of any value: each unmet one is named with what was found, and the check raises one error or none."""
    fields = {field.name for field in dataclasses.fields(requirements.EngineFacts)} - {"geometry", "capability"}
    size = st.integers(-1, 3)
    values = dict(
        model_type=st.sampled_from([None, "deepseek_v41", "deepseek_v41_text", "deepseek_v4", "llama", ""]),
        geometry_error=st.sampled_from([None, "why"]),
        platform=st.sampled_from(["cuda", "hip", "npu", "cpu", ""]),
        deepgemm_error=st.sampled_from([None, "why"]),
        pool_error=st.sampled_from([None, "why"]),
        index_page=st.sampled_from([None, -8, 0, 8, 12, 64, 128]),
        pool_stride=st.sampled_from([None, 0, 4352, 8704, 17]),
        topk_backend=st.sampled_from(["sgl-kernel", "torch", "flashinfer"]),
        chunked_prefill_size=st.sampled_from([None, -1, 0, 1, 8192]),
        dcp_size=size,
        pp_size=size,
        two_batch_overlap=st.booleans(),
        hisparse=st.booleans(),
        other_phase=st.sampled_from(["dsv4", "dsv41-sparse", "fa3"]),
        forced_kernels=st.sampled_from([None, *KERNEL_SETS, "", "fastest"]),
    )
    assert values.keys() == fields
    geometry = data.draw(st.sampled_from([None, RELEASED]))
    if geometry is not None:
        number = st.integers(1, 4096)
        geometry = dataclasses.replace(
            geometry,
            topk_blocks=data.draw(number),
            block_size=8 * data.draw(st.integers(1, 9)),
            topk=data.draw(st.one_of(number, st.sampled_from([0, 512, 1024]))),
            heads=data.draw(st.sampled_from([0, 1, 8, 16, 24, 32, 64, 128, 256, 2**20])),
            head_dim=data.draw(st.sampled_from([64, 128])),
        )
    capability = data.draw(st.one_of(st.none(), st.tuples(st.integers(0, 13), st.integers(0, 3))))
    facts = requirements.EngineFacts(
        geometry=geometry,
        capability=capability,
        **{name: data.draw(values[name], label=name) for name in sorted(values)},
    )
    failures = requirements.unmet(facts)
    for one in failures:
        assert one.what and one.found and one.needed and one.change
    if failures:
        with pytest.raises(requirements.RequirementsError) as error:
            requirements.check(facts)
        assert error.value.unmet == failures
    else:
        requirements.check(facts)
        assert facts.geometry is not None and requirements.kernel_set_of(facts) in KERNEL_SETS


@pytest.mark.parametrize(
    "field,value",
    [
        ("candidate_topk_blocks", "many"),
        ("candidate_topk_blocks", 8.5),
        ("candidate_block_size", [8]),
        ("candidate_source_layer_id", float("nan")),
        ("index_source_layer_ids", 24),
        ("index_source_layer_ids", [20, None]),
        ("compress_ratios", "12"),
        ("index_topk", {}),
        ("index_n_heads", True),
        ("kv_source_layer_ids", {20: 1}),
    ],
)
def test_config_values_that_are_no_numbers(field, value):
    """What the fuzzer found: these ended the start with a TypeError, or were taken for a number."""
    with pytest.raises(GeometryError, match=f"{field} .*whole number"):
        CandidateGeometry.from_config(types.SimpleNamespace(**{**CONFIG, field: value}))
