"""A tokenizer of 64 words with a ChatML template, and a target with random weights that uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Token ids are indices into this list.
WORDS = [
    "<|im_start|>",
    "<|im_end|>",
    "<unk>",
    "\n",
    "user",
    "assistant",
    "system",
    "hi",
    "hello",
    "bye",
    "good",
    "day",
]
WORDS += [f"w{i}" for i in range(len(WORDS), 64)]


def tiny_tokenizer(chat_template: str | None = CHATML, special: tuple[str, ...] = ("<|im_start|>",)) -> Any:
    """One token per word of `WORDS`; line breaks are tokens, spaces only separate."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(Regex(" +"), "removed")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=list(special),
        chat_template=chat_template,
        name_or_path="tiny",
    )


def write_tiny_chat_target(folder: Path, seed: int = 0) -> Path:
    """A Llama of 2 layers with `tiny_tokenizer`, weights large enough that its choices are not ties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention knows
        num_hidden_layers=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
