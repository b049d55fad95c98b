"""A small Qwen3-MoE of Hugging Face with a tokenizer of words, and conversations to train on."""

from pathlib import Path

import torch

from tests.external.beside import LAYERS, VOCABULARY

EXPERTS = 8
TEXT = "a token of the text goes to two experts and comes back with what they made of it"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' <end> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def save_model(folder: Path) -> None:
    """Saves the model in bfloat16, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    names = ["<pad>", "<end>", "<unknown>", "system", "user", "assistant", *sorted({*TEXT.split()})]
    words = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unknown>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unknown>",
        chat_template=TEMPLATE,
    )
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


Conversation = list[dict[str, str]]


def conversations(count: int) -> list[Conversation]:
    """Returns conversations of a question and an answer, of many lengths."""
    text, found = TEXT.split(), []
    for i in range(count):
        turned = text[i % len(text) :] + text[: i % len(text)]
        question, answer = " ".join(turned[: 3 + i % 5]), " ".join(turned[5:])
        found.append(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        )
    return found
