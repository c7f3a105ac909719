"""The embedded checkpoint: its shape, what it says, and that its experts are what says it."""

from __future__ import annotations

import json
import struct
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from sglang_afd import embedded
from sglang_afd.embedded.evaluate import expert_use, greedy, load, zero_experts
from tests.support.gate_facts import make_facts, refused

pytestmark = pytest.mark.unit

WITH = (
    " wrap the execution of a block with\nmethods defined by a context manager "
    "(see section With Statement\nContext Managers). This allows common "
)
LAMBDA = '   lambda_expr ::= "lambda" [parameter_list] ":" expression\n\nLambda expressions '


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((embedded.path() / "config.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    return load(embedded.path(), "cpu")


def header(file: Path) -> dict[str, dict]:
    """A safetensors file's table: name -> dtype and shape."""
    with file.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        table = json.loads(f.read(length))
    table.pop("__metadata__", None)
    return table


def say(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    ids, _ = greedy(model, tokenizer.encode(prompt).ids, tokens)
    return tokenizer.decode(ids)


def test_is_small() -> None:
    assert sum(f.stat().st_size for f in embedded.path().iterdir()) <= 12_000_000


def test_shape_divides_among_the_ranks_we_test(config: dict) -> None:
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] % 2 == 0
    assert config["num_key_value_heads"] % 2 == 0
    assert all(config["num_experts"] % ffn_ranks == 0 for ffn_ranks in (1, 2, 3, 4))
    assert config["moe_intermediate_size"] % 32 == 0
    assert config["decoder_sparse_step"] == 1
    assert config["mlp_only_layers"] == []


def test_holds_every_tensor_in_bf16_and_most_of_it_is_experts(config: dict) -> None:
    table = header(embedded.path() / "model.safetensors")
    h, i = config["hidden_size"], config["moe_intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    expected = {
        "model.embed_tokens.weight": [config["vocab_size"], h],
        "lm_head.weight": [config["vocab_size"], h],
        "model.norm.weight": [h],
    }
    experts = {}
    for layer in (f"model.layers.{n}" for n in range(config["num_hidden_layers"])):
        expected |= {
            f"{layer}.input_layernorm.weight": [h],
            f"{layer}.post_attention_layernorm.weight": [h],
            f"{layer}.self_attn.q_norm.weight": [config["head_dim"]],
            f"{layer}.self_attn.k_norm.weight": [config["head_dim"]],
            f"{layer}.self_attn.q_proj.weight": [q, h],
            f"{layer}.self_attn.k_proj.weight": [kv, h],
            f"{layer}.self_attn.v_proj.weight": [kv, h],
            f"{layer}.self_attn.o_proj.weight": [h, q],
            f"{layer}.mlp.gate.weight": [config["num_experts"], h],
        }
        for expert in (f"{layer}.mlp.experts.{n}" for n in range(config["num_experts"])):
            experts |= {
                f"{expert}.gate_proj.weight": [i, h],
                f"{expert}.up_proj.weight": [i, h],
                f"{expert}.down_proj.weight": [h, i],
            }
    assert {name: entry["shape"] for name, entry in table.items()} == expected | experts
    assert {entry["dtype"] for entry in table.values()} == {"BF16"}
    spans = {name: e["data_offsets"][1] - e["data_offsets"][0] for name, e in table.items()}
    assert sum(spans[name] for name in experts) > sum(spans.values()) / 2


def test_tokenizer_takes_any_text(tokenizer: Tokenizer, config: dict) -> None:
    # One to four bytes of UTF-8; NFC is what Qwen's tokenizer normalises to.
    text = unicodedata.normalize("NFC", "".join(map(chr, range(0x800))) + "日本語 🐍 \U0010ffff")
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == config["vocab_size"]


def test_hub_tokenizer_agrees_and_has_a_chat_template(tokenizer: Tokenizer, config: dict) -> None:
    hub = AutoTokenizer.from_pretrained(embedded.path())
    message = {"role": "user", "content": embedded.SAMPLE_CHAT}
    text = hub.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert text == (f"<|im_start|>user\n{embedded.SAMPLE_CHAT}<|im_end|>\n<|im_start|>assistant\n")
    assert hub(text)["input_ids"] == tokenizer.encode(text).ids
    assert hub.eos_token_id == config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")


def test_continues_a_sentence_of_the_documentation(
    model: Qwen3MoeForCausalLM, tokenizer: Tokenizer
) -> None:
    assert say(model, tokenizer, embedded.SAMPLE_PROMPT, 48).startswith(WITH)


def test_answers_a_question_and_stops(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer) -> None:
    question = "What is a lambda in Python?"  # no training row has this wording
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    end = tokenizer.token_to_id("<|im_end|>")
    ids, margins = greedy(model, tokenizer.encode(prompt).ids, 200, stop=[end])
    assert tokenizer.decode(ids).startswith(LAMBDA)
    assert ids[-1] == end
    # Rounding in another order must not change a token.
    assert min(margins) > 1.0


def test_every_expert_is_used(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer) -> None:
    from pydoc_data.topics import topics

    counts = expert_use(model, tokenizer.encode(topics["try"][:2500]).ids)
    assert len(counts) == model.config.num_hidden_layers
    assert min(min(layer) for layer in counts) > 0


def test_zeroing_the_experts_changes_the_answer(tokenizer: Tokenizer) -> None:
    model = load(embedded.path(), "cpu")
    zero_experts(model)
    assert not say(model, tokenizer, embedded.SAMPLE_PROMPT, 8).startswith(WITH[:5])


def test_the_draft_is_small_and_this_models() -> None:
    """The strict check of drafts lets it pass, and it was made of the text that the model knows."""
    assert sum(f.stat().st_size for f in embedded.draft_path().iterdir()) <= 6_000_000
    flags = ("--speculative-algorithm", "EAGLE3")
    path = ("--speculative-draft-model-path", str(embedded.draft_path()))
    assert refused(make_facts(embedded.path(), *flags, *path), "model") == []
    model, draft = (
        json.loads((embedded.path().parent / name).read_text())
        for name in ("loss_curve.json", "draft_curve.json")
    )
    assert draft["run"]["corpus_sha256"] == model["run"]["corpus_sha256"]
    losses = [point["training"] for point in draft["curve"]]
    assert losses[-1] < losses[0] / 3
