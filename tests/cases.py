"""Troubles that users of speculative decoding report, each with an id that tests carry as `@pytest.mark.case("F1")`.

tests/test_readme.py asserts that each is carried by a test or has a line in README that says why not.
"""

from __future__ import annotations

#: What happened to somebody, with some engine or drafter.
CASES = {
    "F1": "a prefix from the cache has no drafter context, and acceptance collapses",
    "F2": "speculation turns prefix caching off",
    "F4": "slower than plain decoding from about eight concurrent requests on",
    "F5": "slower than plain decoding at long context",
    "F6": "the window that the drafter was trained with is ignored",
    "F7": "hidden states come from the layer beside the right one",
    "F8": "the checkpoint predicts from its anchor slot, and is served as if it did not",
    "F9": "head, reduced vocabulary or padding wired wrongly",
    "F10": "min_p or logit_bias is refused with HTTP 400",
    "F11": "errors of the grammar in JSON and tool calls",
    "F12": "greedy text differs, and nobody can say whether that is a bug",
    "F13": "sampled text has another distribution, or sampled drafts are hardly accepted",
    "F14": "sampling parameters are silently dropped",
    "F16": "a crash or wrong text after thousands of steps",
    "F18": "a quantised drafter crashes or drafts at random",
    "F19": "fp8 KV cache against non-causal draft attention",
    "F20": "an attention backend that cannot serve the drafter's shape",
    "F21": "a quantised target head",
    "F23": "pipeline parallel starts and then goes wrong",
    "F24": "data parallel stops at start, or an idle rank hangs",
    "F26": "fewer tokens are drafted at the full price",
    "F27": "a K that does not fit the trained block",
    "F28": "the method is guessed from a folder's name; K has to be given",
    "F29": "a checkpoint's dialect is not understood",
    "F30": "a mask token that is missing or outside the vocabulary",
    "F31": "RoPE is not as trained",
    "F32": "peculiarities of a family of targets: embedding scale, soft cap",
    "F33": "a variant is silently served as something simpler",
    "F35": "the drafter eats the KV cache",
    "F36": "the time to the first token grows",
    "F37": "images: positions or embeddings",
    "F38": "LoRA and fine-tuned targets",
    "F39": "tokens whose K/V come from a connector have no drafter context",
    "F40": "hybrid targets break when a step has no drafts",
    "F41": "the drafter's maximum length shortens the target's",
    "F43": "counters say nothing where drafts are skipped",
    "F44": "good training curves, bad serving",
    "F44b": "nobody knows which acceptance to expect",
    "F45": "training needs too much disk, or cannot resume",
    "F46": "no way to train for a model of one's own",
    "F47": "hooks of a plugin break silently with a new vLLM",
    "F48": "the CPU backend, with and without Triton",
    "F49": "a warm start loses or overwrites tensors",
    "F50": "a seed does not give the same text",
    "F52": "a drafter of another tokenizer",
}

#: Where no test here can show it; README repeats these lines.
NOT_COVERED: dict[str, str] = {
    "F20": "On a CPU vLLM has one attention backend, so the choice between backends is tested on GPUs only.",
    "F37": "Image targets need torchvision, which does not load beside the CPU build of torch, so they are not tested.",
}
