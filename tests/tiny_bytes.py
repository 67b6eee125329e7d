"""A byte-level BPE tokenizer of 300 tokens, in which any text can be written, and a random target that uses it.

Stop strings, grammars and streaming need a real tokenizer: several tokens per word, tokens that are half a character,
several ways to write one text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import write_tiny_target

VOCAB = 300
#: Tokens from 5 to before this one are the visible characters of ASCII but A.
FIRST_BEYOND_ASCII = 98
#: The ids that tiny targets know as such. Token 0 is a letter, so that a placeholder 0 is a token like others.
BOS, EOS = 1, 2
_SPECIAL = {"<s>": BOS, "</s>": EOS, "<|im_start|>": 3, "<|im_end|>": 4}
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """Token 0 is the letter A, then come four special tokens, the other 255 bytes, and 40 pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2 writes every byte as one visible character; the space is Ġ.
    alphabet = ["A", *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"A"})]
    words = [alphabet[0], *_SPECIAL, *alphabet[1:]]
    pairs = [(first, second) for first in '"{}:, 0'.replace(" ", "Ġ") for second in '"{}12a'][: VOCAB - len(words)]
    vocabulary = {word: i for i, word in enumerate([*words, *(first + second for first, second in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=_CHATML, name_or_path="bytes"
    )


def write_byte_target(folder: Path, seed: int = 0) -> Path:
    """`write_tiny_target` with `byte_tokenizer`."""
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == VOCAB
    write_tiny_target(folder, vocab_size=VOCAB, seed=seed)
    tokenizer.save_pretrained(folder)
    return folder
