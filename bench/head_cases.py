"""LM head and loss on a shape, for bench_kernels.py."""

from __future__ import annotations

from typing import Any

import torch
from floors import Case
from implementations import SUMMED, Implementations, Outputs, Tolerance, compared
from torch.nn import functional

from vllm_dflash.triton_kernels import draft_head as head
from vllm_dflash.triton_kernels import draft_loss as loss
from vllm_dflash.triton_kernels.head_quantisation import quantise_head

#: Gradients are rounded to bfloat16 twice, as d(logits) and as d(hidden), and cancel: the label's share against all.
GRADIENT = Tolerance(2e-2, 1e-2)


def draft_head(case: Case, device: str, is_interpreted: bool, is_fp8: bool = False) -> Implementations:
    model = case.model
    hidden = torch.randn(case.rows, model.hidden, device=device, dtype=torch.bfloat16)
    weight = torch.randn(model.vocabulary, model.hidden, device=device, dtype=torch.bfloat16) * model.hidden**-0.5
    scale = None
    used = weight
    if is_fp8:
        used, scale = quantise_head(weight)
    positional = (hidden, used, None, scale, 1, model.vocabulary, 0.0, 1.0, None)

    def ours() -> Outputs:
        if is_interpreted:
            return head._launch(*positional)._asdict()
        return head.draft_head(hidden, used, weight_scale=scale)._asdict()

    def twin() -> Outputs:
        return head.draft_head_torch(*positional)._asdict()

    def baseline() -> Outputs:
        return {"tokens": functional.linear(hidden, weight).argmax(-1)}

    def differences(actual: Outputs, expected: Outputs) -> list[str]:
        found = compared(actual, expected, {"logits": SUMMED, "log_sum_exp": SUMMED})
        tokens = actual["tokens"][:, 0]
        if bool(((tokens < 0) | (tokens >= model.vocabulary)).any()):
            return [*found, "tokens outside of the vocabulary"]
        # Of two logits that are nearly equal either may win; its own logit tells whether the token belongs to it.
        logits = (hidden.float() * used[tokens].float()).sum(1)
        logits = logits if scale is None else logits * scale[tokens]
        return found + compared({"tokens' logits": logits[:, None]}, {"tokens' logits": expected["logits"]},
                                {"tokens' logits": SUMMED})  # fmt: skip

    return Implementations({"ours": ours, "twin": twin, "baseline": baseline}, differences)


def draft_head_fp8(case: Case, device: str, is_interpreted: bool) -> Implementations:
    return draft_head(case, device, is_interpreted, is_fp8=True)


def draft_loss(case: Case, device: str, is_interpreted: bool) -> Implementations:
    """Loss and gradient of the hidden states; hard labels, weights per slot, the head frozen."""
    model = case.model
    hidden = torch.randn(case.rows, model.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(model.vocabulary, model.hidden, device=device, dtype=torch.bfloat16) * model.hidden**-0.5
    labels = torch.randint(model.vocabulary, (case.rows,), device=device)
    slot_weights = torch.rand(case.rows, device=device)
    label = (labels[:, None], torch.ones(case.rows, 1, device=device), labels)

    def with_gradient(losses: torch.Tensor) -> Outputs:
        (gradient,) = torch.autograd.grad((losses * slot_weights).sum(), hidden)
        return {"losses": losses.detach(), "gradient": gradient}

    def ours() -> Outputs:
        run: Any = loss._DraftLoss.apply if is_interpreted else loss.draft_loss
        return with_gradient(run(hidden, weight, *label, None, None)[0])

    def twin() -> Outputs:
        return with_gradient(loss.draft_loss_torch(hidden, weight, *label)[0])

    def baseline() -> Outputs:
        logits = functional.linear(hidden, weight).float()
        return with_gradient(functional.cross_entropy(logits, labels, reduction="none"))

    def differences(actual: Outputs, expected: Outputs) -> list[str]:
        # Logits are rounded to bfloat16 before the loss, in the twin as well, but in another order of sums.
        return compared(actual, expected, {"losses": Tolerance(2**-7, 2**-8), "gradient": GRADIENT})

    return Implementations({"ours": ours, "twin": twin, "baseline": baseline}, differences, is_capturable=False)
