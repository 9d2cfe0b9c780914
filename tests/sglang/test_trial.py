"""`dsv41-sparse try`: what it reports, and that it notices a wrong selection."""

import ast
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")
import torch

from sglang_dsv41 import models, trial
from sglang_dsv41.geometry import CandidateGeometry
from sglang_dsv41.kernels.reference import ReferenceKernels
from sglang_dsv41.plugin import NAME, STOCK

SMALL = CandidateGeometry(topk_blocks=16, block_size=8, topk=24, heads=16, source_layer=6, consumer_layers=(8, 9))
CONTEXTS = [1, 24, 127, 128, 129, 700]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("DSV41_SPARSE_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


def quiet(text):
    pass


# ---- without a GPU ----


def test_cpu_counts_what_each_row_saved():
    reports = trial.compare(SMALL, CONTEXTS, say=quiet)
    assert [row.context for row in reports] == CONTEXTS
    assert [row.dense for row in reports] == [2 * context for context in CONTEXTS]
    # 16 blocks of 8, the newest of 129 positions holds one and that of 700 four.
    assert [row.sparse for row in reports] == [2, 48, 254, 256, 2 * 121, 2 * 124]
    assert reports[-1].factor == pytest.approx(700 / 124)
    assert all(0.9 < row.overlap <= 1 for row in reports)


def test_cpu_candidate_blocks_larger_than_the_kernel_block():
    geometry = CandidateGeometry(topk_blocks=8, block_size=32, topk=24, heads=16, source_layer=6, consumer_layers=(8,))
    assert [row.sparse for row in trial.compare(geometry, [200, 900], say=quiet)] == [200, 7 * 32 + 4]


def test_cpu_notices_a_wrong_pick(monkeypatch):
    real = ReferenceKernels.select_candidates

    def select(self, logits, rows, tile, **outputs):
        # The worst columns instead of the best.
        real(self, -logits, rows, tile, **outputs)

    monkeypatch.setattr(ReferenceKernels, "select_candidates", select)
    with pytest.raises(trial.TrialError, match="layer 8: .* differ from the dense selection, and not by a tie"):
        trial.compare(SMALL, [700], say=quiet)


def test_cpu_notices_a_wrong_logit(monkeypatch):
    real = ReferenceKernels.sparse_logits

    def sparse_logits(self, queries, keys, rows, tile):
        return real(self, queries, keys, rows, tile).roll(1, dims=1)

    monkeypatch.setattr(ReferenceKernels, "sparse_logits", sparse_logits)
    with pytest.raises(trial.TrialError, match="not by a tie"):
        trial.compare(SMALL, [700], say=quiet)


def test_cpu_notices_a_missing_pick(monkeypatch):
    real = ReferenceKernels.select_candidates

    def select(self, logits, rows, tile, *, out_positions, out_slots):
        real(self, logits, rows, tile, out_positions=out_positions, out_slots=out_slots)
        out_slots[tile, 0] = -1

    monkeypatch.setattr(ReferenceKernels, "select_candidates", select)
    with pytest.raises(trial.TrialError, match="23 picks, 23 of them visible; not 24"):
        trial.compare(SMALL, [700], say=quiet)


@pytest.mark.parametrize("worst, message", [(True, "scores higher"), (False, "newest among them")])
def test_cpu_notices_wrong_blocks(monkeypatch, worst, message):
    real = ReferenceKernels.choose_blocks

    def choose_blocks(self, logits, rows, tile):
        newest = (rows.lens[tile, None] - 1) // SMALL.block_size
        if worst:
            return real(self, -logits, rows, tile)
        blocks = real(self, logits, rows, tile)
        return torch.where(blocks == newest, -1, blocks)

    monkeypatch.setattr(ReferenceKernels, "choose_blocks", choose_blocks)
    with pytest.raises(trial.TrialError, match=message):
        trial.compare(SMALL, [700], say=quiet)


def test_ties_at_the_cut_are_a_free_choice():
    scores = torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0])
    rows = trial.SimpleNamespace(block_table=torch.tensor([[0]], dtype=torch.int32), table_slots=256)
    geometry = trial.SimpleNamespace(topk=3, source_layer=6)

    def check(picks):
        return trial._check_picks(torch.tensor(picks, dtype=torch.int32), scores, None, rows, 0, geometry)

    results = [check([0, 2, tie]) for tie in (1, 3, 4)]
    assert sorted(results) == [(2 / 3, 1), (2 / 3, 1), (1.0, 0)]
    with pytest.raises(trial.TrialError, match="1 picks differ"):
        check([0, 1, 3])


def test_try_on_the_cpu(capsys):
    assert trial.main(["--cpu", "--contexts", "300", "20000"]) == 0
    out = capsys.readouterr().out
    assert "layers [24, 28, 32, 36] score 2048 blocks of 8 positions" in out
    assert "layer 36 (consumer): scored 16,6" in out
    *_, short, long = [line.split() for line in out.splitlines() if line.split() and line.split()[-1].isdigit()]
    assert short[:4] == ["300", "1,200", "1,200", "1.0x"]
    assert long[:4] == ["20,000", "80,000", "65,536", "1.2x"]


@pytest.mark.parametrize(
    "kernels, message", [("blackwell", "cannot run without a GPU"), ("portable", "TRITON_INTERPRET=1")]
)
def test_kernels_that_need_a_gpu_are_refused(monkeypatch, capsys, kernels, message):
    monkeypatch.setenv("DSV41_SPARSE_KERNELS", kernels)
    assert trial.main(["--cpu"]) == 1
    assert message in capsys.readouterr().err


def test_contexts_must_be_positive(capsys):
    assert trial.main(["--cpu", "--contexts", "0"]) == 1
    assert "--contexts must be positive" in capsys.readouterr().err


def test_without_sglang_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(trial, "sglang_installed", lambda: False)
    assert trial.main([]) == 1
    assert "pip install 'sglang>=0.5.23,<0.5.24'" in capsys.readouterr().err


# ---- with a GPU: all but the engines ----


def answer(tokens, speed=100.0):
    return {
        "prompt_tokens": 20000,
        "output_ids": tokens,
        "text": "noise",
        "first_seconds": 0.5,
        "tokens_per_second": speed,
    }


@pytest.mark.parametrize("stock, status", [([1, 2, 3], 0), ([1, 2, 4], 1)])
def test_gpu_prints_both_answers_side_by_side(monkeypatch, tmp_path, capsys, stock, status):
    answers = {NAME: answer([1, 2, 3], 140.0), STOCK: answer(stock)}

    def serve(backend, model, folder):
        assert json.loads((model / "config.json").read_text())["model_type"] == "deepseek_v41"
        (folder / f"{backend}.log").write_text(backend_log_line("portable") if backend == NAME else "")
        return answers[backend]

    monkeypatch.setattr(trial, "_serve", serve)
    monkeypatch.setattr(trial, "has_gpu", lambda: True)
    assert trial.main(["--keep", str(tmp_path)]) == status
    out = capsys.readouterr().out
    assert f"{NAME}:  [1, 2, 3]" in out and f"{STOCK}:          {stock}" in out
    assert f"equal:         {'no' if status else 'yes'}" in out
    assert "kernel set:    portable" in out and "140 tokens/s" in out


def backend_log_line(kernels):
    """The line that the backend logs, from its own source."""
    source = ast.parse((Path(trial.__file__).parent / "backend.py").read_text())
    (text,) = [
        node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and "Kernels: %s" in str(node.value)
    ]
    line = text.replace("Kernels: %s", f"Kernels: {kernels}")
    return "[2026-01-01] INFO " + line.replace("%s", "words").replace("%d", "64").replace("%.1f", "1.0")


def test_kernel_set_from_the_backends_log_line():
    assert trial.kernel_set_in(backend_log_line("blackwell")) == "blackwell"
    with pytest.raises(trial.TrialError, match="does not say that dsv41-sparse ran"):
        trial.kernel_set_in("attention backend dsv4")


def test_an_engine_that_dies_is_reported_with_its_log(monkeypatch, tmp_path, capsys):
    engine = tmp_path / "python"
    engine.write_text("#!/bin/sh\necho out of memory, for example\nexit 3\n")
    engine.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(engine))
    monkeypatch.setattr(trial, "has_gpu", lambda: True)
    assert trial.main(["--keep", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"SGLang with {NAME} ended with 3" in error and "out of memory, for example" in error and "doctor" in error


def test_the_prompt_is_longer_than_the_candidates_hold(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.write_model(tmp_path / "model"))
    text = trial.prompt_text(tokenizer, trial.PROMPT_TOKENS)
    length = len(tokenizer.encode(text))
    assert trial.released_geometry().columns + trial.MANY < length < trial.CONTEXT_LENGTH - trial.MANY
    assert text == trial.prompt_text(tokenizer, trial.PROMPT_TOKENS)
