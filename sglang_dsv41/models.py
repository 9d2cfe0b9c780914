"""Small random-weight DeepSeek-V4.1 models: a config and a tokenizer, weights made by `--load-format dummy`.

Import-light: no torch, no SGLang, no transformers. Only writing a tokenizer needs the `tokenizers` package, which
every SGLang installation brings along.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

# SGLang's `sglang.benchmark.one_batch` draws token ids below 10,000, so a smaller vocabulary would be read out of
# bounds there.
DEFAULT_VOCAB_SIZE = 10240
DEFAULT_MAX_POSITION = 1 << 20

# The spellings that SGLang's chat encoding of this model writes, so that a chat prompt meets its special tokens.
BOS, EOS, PAD, USER, ASSISTANT, THINK, END_THINK, MASK, SYSTEM, REMINDER, TOOLS = SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜mask｜>",
    "<｜System｜>",
    "<｜latest_reminder｜>",
    "｜DSML｜",
)
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
MASK_ID = SPECIAL_TOKENS.index(MASK)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# For programs that read the template; SGLang's server has its own encoding of DeepSeek-V4.1 chats.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

# What the presets share: the released widths, with few and narrow experts.
_COMMON = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 5120,
    "moe_intermediate_size": 256,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_rope_theta": 160000,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "num_nextn_predict_layers": 0,
}

PRESETS = {
    # One full ratio-2 source (2), the candidate source (6), four consumers (8 to 11).
    "tiny": {
        "num_hidden_layers": 12,
        "compress_ratios": [0, 0] + [2] * 4 + [1] * 6,
        "kv_source_layer_ids": [2, 6],
        "index_source_layer_ids": [2, 6, 8, 9, 10, 11],
        "candidate_source_layer_id": 6,
    },
    # Every layer of the released model in its place.
    "topology": {
        "num_hidden_layers": 40,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
    },
}

# A bundled DSpark draft: one draft stage for each target layer whose hidden state it reads.
DSPARK_STAGES = 3
_DSPARK = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": MASK_ID,
}


def model_config(
    preset: str,
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    max_position: int = DEFAULT_MAX_POSITION,
    dspark: bool = False,
) -> dict:
    """The `config.json` of a preset."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab size {vocab_size} is too small: 256 bytes and the special tokens need {MIN_VOCAB_SIZE}"
        )
    if max_position < 1:
        raise ValueError(f"max position {max_position} is not positive")
    text = _COMMON | PRESETS[preset] | {"vocab_size": vocab_size, "max_position_embeddings": max_position}
    if dspark:
        layers = text["num_hidden_layers"]
        text |= _DSPARK | {"dspark_target_layer_ids": list(range(layers - DSPARK_STAGES, layers))}
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        **tokens,
        "text_config": text | tokens,
    }


def _merge_pairs() -> Iterator[tuple[str, str]]:
    """Merges in rank order: pairs of letters, a space before a letter, then triples; frequent letters first."""
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = sorted(product(range(26), repeat=2), key=lambda ij: (sum(ij), ij))
    yield from ((letters[i], letters[j]) for i, j in pairs)
    yield from (("Ġ", letter) for letter in letters)  # byte-level spelling of a space
    triples = sorted(product(range(26), repeat=3), key=lambda ijk: (sum(ijk), ijk))
    yield from ((letters[i] + letters[j], letters[k]) for i, j, k in triples)


def build_tokenizer(vocab_size: int = DEFAULT_VOCAB_SIZE):
    """A byte-level BPE `tokenizers.Tokenizer` that encodes any text without loss; it needs no corpus, so it is the
    same everywhere. Ids: special tokens, the 256 bytes, then merges until the vocabulary is full."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise RuntimeError(
            "writing a model's tokenizer needs the `tokenizers` package, which SGLang installs; "
            "run this in SGLang's environment or `pip install tokenizers`"
        ) from error

    entries = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = list(islice(_merge_pairs(), max(0, vocab_size - len(entries))))
    entries += [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(out: Path, *, vocab_size: int, max_position: int) -> None:
    """Write the tokenizer files that transformers' AutoTokenizer reads without a network."""
    tokenizer = build_tokenizer(vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "mask_token": MASK,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_position,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_model(
    out: Path | str,
    preset: str = "tiny",
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    max_position: int = DEFAULT_MAX_POSITION,
    dspark: bool = False,
) -> Path:
    """Write a model folder to start with `--load-format dummy`; returns it."""
    config = model_config(preset, vocab_size=vocab_size, max_position=max_position, dspark=dspark)
    out = Path(out)
    # The config last: a folder that has one is complete.
    write_tokenizer(out, vocab_size=vocab_size, max_position=max_position)
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(out / "generation_config.json", tokens)
    _write_json(out / "config.json", config)
    return out


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """`dsv41-sparse model`."""
    parser = argparse.ArgumentParser(
        prog="dsv41-sparse model",
        description="Write a small random-weight DeepSeek-V4.1 model folder (config and tokenizer). It holds no weights: "
        "start the server on it with --load-format dummy.",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="12 layers, or the released 40-layer topology"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, metavar="N")
    parser.add_argument("--max-position", type=int, default=DEFAULT_MAX_POSITION, metavar="N")
    parser.add_argument("--dspark", action="store_true", help="bundle a random DSpark draft (speculative decoding)")
    args = parser.parse_args(argv)
    try:
        write_model(
            args.out, args.preset, vocab_size=args.vocab_size, max_position=args.max_position, dspark=args.dspark
        )
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dsv41-sparse model: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.out} ({args.preset}); start it with --model-path {args.out} --load-format dummy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
