"""The generated model folders: their geometry, their tokenizer, and that SGLang reads them."""

import json
import random
import subprocess
import sys

import pytest

from sglang_dsv41 import models


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def text_config(preset, **options):
    return models.model_config(preset, **options)["text_config"]


def test_tiny_has_one_of_each_index_layer():
    config = text_config("tiny")
    assert config["num_hidden_layers"] == len(config["compress_ratios"]) == 12
    assert config["candidate_source_layer_id"] == 6
    assert [i for i in config["index_source_layer_ids"] if i > 6] == [8, 9, 10, 11]
    assert [i for i in config["index_source_layer_ids"] if config["compress_ratios"][i] == 2] == [2]


def test_topology_is_the_released_one():
    config = text_config("topology")
    assert config["num_hidden_layers"] == len(config["compress_ratios"]) == 40
    assert config["compress_ratios"] == [0, 0] + [2] * 18 + [1] * 20
    assert config["kv_source_layer_ids"] == [2, 8, 14, 20]
    assert config["index_source_layer_ids"] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert config["candidate_source_layer_id"] == 20


@pytest.mark.parametrize("preset", models.PRESETS)
def test_widths_are_the_released_ones(preset):
    config = text_config(preset)
    assert (config["hidden_size"], config["num_attention_heads"], config["head_dim"]) == (5120, 64, 512)
    assert (config["index_n_heads"], config["index_head_dim"], config["index_topk"]) == (32, 128, 512)
    assert (config["candidate_topk_blocks"], config["candidate_block_size"]) == (2048, 8)


def test_presets_share_no_state():
    text_config("tiny")["rope_scaling"] = None
    assert text_config("tiny")["rope_scaling"]["factor"] == 16
    assert not any(key.startswith("dspark") for key in text_config("tiny"))


@pytest.mark.parametrize("options", [{"vocab_size": 100}, {"max_position": 0}])
def test_impossible_sizes_are_refused(options):
    with pytest.raises(ValueError, match="too small|not positive"):
        models.model_config("tiny", **options)


def test_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="known: tiny, topology"):
        models.model_config("huge")


def test_dspark_draft_reads_the_last_layers():
    config = text_config("tiny", dspark=True)
    assert config["dspark_target_layer_ids"] == [9, 10, 11]
    assert config["dspark_block_size"] == 5
    assert config["dspark_noise_token_id"] < config["vocab_size"]


def test_module_needs_nothing_beyond_the_standard_library(tmp_path):
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from sglang_dsv41 import models\n"
        "assert not {'torch', 'sglang', 'transformers'} & set(sys.modules)\n"
        "sys.exit(models.main(['--out', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("dsv41-sparse model: ") and "Traceback" not in done.stderr


def test_missing_tokenizers_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert models.main(["--out", str(tmp_path / "m")]) == 1
    assert "pip install tokenizers" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


class TestFolder:
    """A written folder, as other programs read it."""

    @pytest.fixture(autouse=True)
    def _tokenizers(self, monkeypatch):
        pytest.importorskip("tokenizers")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def write(self, tmp_path, *arguments):
        assert models.main(["--out", str(tmp_path / "model"), *arguments]) == 0
        return tmp_path / "model"

    def test_options_reach_the_files(self, tmp_path):
        folder = self.write(tmp_path, "--preset", "topology", "--vocab-size", "512", "--max-position", "8192")
        text = read(folder, "config.json")["text_config"]
        assert (text["vocab_size"], text["max_position_embeddings"], text["num_hidden_layers"]) == (512, 8192, 40)
        assert read(folder, "tokenizer_config.json")["model_max_length"] == 8192

    @pytest.mark.parametrize("vocab_size", [models.MIN_VOCAB_SIZE, 1000, models.DEFAULT_VOCAB_SIZE])
    def test_tokenizer_fills_the_vocabulary(self, vocab_size):
        tokenizer = models.build_tokenizer(vocab_size)
        assert tokenizer.get_vocab_size() == vocab_size
        assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))

    def test_vocabulary_beyond_the_merges(self):
        tokenizer = models.build_tokenizer(1 << 17)
        assert 18000 < tokenizer.get_vocab_size() < 1 << 17

    def test_auto_tokenizer_round_trips_any_text(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        folder = self.write(tmp_path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        rng = random.Random(0)
        texts = ["", "The cat sat on the mat.", "  two  spaces\n\ttab", "naïve 日本語 🐈\u200d⬛ \x00", "<|user|>"]
        texts += ["".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(160, 0xD800)))) for _ in range(200))]
        for text in texts:
            ids = tokenizer.encode(text)
            assert all(0 <= i < models.DEFAULT_VOCAB_SIZE for i in ids)
            assert tokenizer.decode(ids) == text
        assert len(tokenizer.encode("the other letters there")) < len("the other letters there") * 0.7

    def test_special_ids_agree_with_the_config(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        folder = self.write(tmp_path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        for source in (
            read(folder, "config.json"),
            read(folder, "config.json")["text_config"],
            read(folder, "generation_config.json"),
        ):
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                assert source[name] == getattr(tokenizer, name)
        assert tokenizer.mask_token_id == models.MASK_ID

    def test_chat_template(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("jinja2")
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.write(tmp_path))
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text == f"{models.BOS}{models.USER}hi{models.ASSISTANT}yo{models.EOS}{models.ASSISTANT}"

    @pytest.mark.parametrize("preset", models.PRESETS)
    def test_sglang_reads_the_model(self, tmp_path, preset):
        pytest.importorskip("sglang")
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.speculative.dspark_components.dspark_config import checkpoint_bundles_dspark_draft

        config = ModelConfig(str(self.write(tmp_path, "--preset", preset)))
        assert config.hf_config.architectures == ["DeepseekV4ForCausalLM"]
        assert config.hf_config.model_type == "deepseek_v41"
        assert config.hf_config.candidate_source_layer_id == models.PRESETS[preset]["candidate_source_layer_id"]
        assert config.context_len == models.DEFAULT_MAX_POSITION
        assert config.vocab_size == models.DEFAULT_VOCAB_SIZE
        assert config.hf_eos_token_id == {models.EOS_ID}
        assert not checkpoint_bundles_dspark_draft(config.hf_config)

    def test_sglang_reads_the_dspark_draft(self, tmp_path):
        pytest.importorskip("sglang")
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.speculative.dspark_components import dspark_config

        folder = str(self.write(tmp_path, "--dspark"))
        target = ModelConfig(folder)
        assert dspark_config.checkpoint_bundles_dspark_draft(target.hf_config)
        draft = ModelConfig(folder, is_draft_model=True, speculative_algorithm="DSPARK")
        assert draft.hf_config.architectures == ["DeepseekV4ForCausalLMDSpark"]
        runtime = dspark_config.resolve_runtime_config(
            draft_hf_config=draft.hf_config, speculative_num_draft_tokens=None, target_vocab_size=target.vocab_size
        )
        assert (runtime.gamma, runtime.verify_num_draft_tokens, runtime.mask_token_id) == (5, 6, models.MASK_ID)

    def test_sglang_encodes_a_chat_with_the_special_tokens(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("sglang")
        pytest.importorskip("deepseek_recipe")
        from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe

        tokenizer = transformers.AutoTokenizer.from_pretrained(self.write(tmp_path))
        recipe = DeepSeekRecipe.from_hf_tokenizer("dsv41", tokenizer)
        ids = recipe.encode({"messages": [{"role": "user", "content": "hi there"}], "thinking": False})
        special = [token for token in tokenizer.convert_ids_to_tokens(ids) if token in models.SPECIAL_TOKENS]
        assert special == [models.BOS, models.USER, models.ASSISTANT, models.END_THINK]

    def test_sglang_server_starts_its_chat_encoding(self, tmp_path):
        """What the server encodes when it starts, and what a chat with tools and a system prompt needs."""
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("sglang")
        pytest.importorskip("deepseek_recipe")
        from sglang.srt.entrypoints.openai.serving_deepseek_recipe import DeepSeekRecipeChatEncodingAdapter

        tokenizer = transformers.AutoTokenizer.from_pretrained(self.write(tmp_path))
        adapter = DeepSeekRecipeChatEncodingAdapter(
            chat_encoding_spec="dsv41",
            tokenizer=tokenizer,
            reasoning_parser=None,
            tool_call_parser=None,
            chat_hooks=None,
            default_chat_template_kwargs=None,
        )
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
        for thinking in (True, False):
            ids = adapter.deepseek_recipe.encode(
                {
                    "messages": [
                        {"role": "system", "content": "be brief"},
                        {"role": "user", "content": "hi"},
                        {
                            "role": "assistant",
                            "content": "",
                            "tool_calls": [
                                {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
                            ],
                        },
                        {"role": "tool", "tool_call_id": "1", "content": "3"},
                        {"role": "user", "content": "and"},
                    ],
                    "tools": [tool],
                    "thinking": thinking,
                }
            )
            assert models.SPECIAL_TOKENS.index(models.SYSTEM) in ids
            assert models.SPECIAL_TOKENS.index(models.TOOLS) in ids
