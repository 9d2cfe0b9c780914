"""A real SGLang server on the CPU, an ordinary model in it, and the plugin installed: nothing changes but one choice.

The server runs on the test-only platform in cpu_platform/, which is on its PYTHONPATH and nowhere else.
"""

import json
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from sglang_dsv41 import models
from tests.servers import Server

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

PLATFORM = Path(__file__).parent / "cpu_platform"
PROMPTS = ("The capital of France is", "Once upon a time", "日本語")
START_SECONDS = 240
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A two-layer random Llama with the generated models' tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    models.write_tokenizer(folder, vocab_size=1024, max_position=2048)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": models.BOS_ID,
        "eos_token_id": models.EOS_ID,
        "pad_token_id": models.PAD_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class CpuServer(Server):
    """An SGLang server on the test-only platform."""

    def __init__(self, model: Path, log: Path, *options: str, environment: dict[str, str] | None = None):
        arguments = ["--model-path", str(model), "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
        arguments += ["--max-total-tokens", "4096", "--mem-fraction-static", "0.3", "--random-seed", "1", *options]
        super().__init__(
            log,
            arguments,
            environment=server_environment() | (environment or {}),
            cwd=log.parent,  # not the checkout: the installed package is what is tested
            start_seconds=START_SECONDS,
        )


def server_environment() -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DSV41_SPARSE_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PLATFORM), environment.get("PYTHONPATH")])),
        "SGLANG_PLATFORM": "dsv41_test_cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    return environment


def test_plugin_is_installed():
    assert "dsv41_sparse" in {entry.name for entry in entry_points(group="sglang.srt.plugins")}, (
        "install this package first: pip install -e ."
    )


@pytest.fixture(scope="module")
def answers(llama, tmp_path_factory):
    """Output ids and log of a server with the plugin and of one that is told to load none."""
    found = {}
    for name, environment in (("with", {}), ("without", {"SGLANG_PLUGINS": "dsv41_test_log"})):
        log = tmp_path_factory.mktemp("log") / f"{name}.log"
        with CpuServer(llama, log, environment=environment) as server:
            server.wait_ready()
            found[name] = [server.generate(text, NEW_TOKENS) for text in PROMPTS], server.log
    return found


def test_server_answers_the_same(answers):
    with_plugin, without = answers["with"][0], answers["without"][0]
    assert [len(ids) for ids in with_plugin] == [12] * len(PROMPTS)
    assert with_plugin == without
    assert len({tuple(ids) for ids in with_plugin}) > 1, "the answers must depend on the prompt to mean anything"


def test_every_process_loaded_the_plugin(answers):
    log = answers["with"][1]
    processes = re.findall(r"\((\S+)\) Executed general plugin: dsv41_sparse", log)
    assert "MainProcess" in processes, "the server process"
    assert len(set(processes)) >= 3, f"the scheduler and the detokenizer too, not only {processes}"
    assert "Traceback" not in log
    assert "NOT registered" not in log
    assert "Executed general plugin: dsv41_sparse" not in answers["without"][1]
    assert "Executed general plugin: dsv41_test_log" in answers["without"][1]


def test_other_model_is_refused_by_the_backend(llama, tmp_path):
    """The server process accepts the name, the scheduler process creates the backend, and that names the model."""
    with CpuServer(llama, tmp_path / "refused.log", "--attention-backend", "dsv41-sparse") as server:
        assert server.wait_ended() != 0
        assert "invalid choice" not in server.log
        assert "dsv41-sparse" in server.log and "LlamaForCausalLM" in server.log


def test_switched_off_backend_is_an_invalid_choice(llama, tmp_path):
    options = ("--attention-backend", "dsv41-sparse")
    environment = {"DSV41_SPARSE_DISABLE": "1"}
    with CpuServer(llama, tmp_path / "off.log", *options, environment=environment) as server:
        assert server.wait_ended() == 2
        assert "invalid choice: 'dsv41-sparse'" in server.log
        assert "DSV41_SPARSE_DISABLE" in server.log
