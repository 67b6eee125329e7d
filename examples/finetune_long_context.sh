#!/usr/bin/env bash
# Adapt a drafter to long context, as the paper does: a few epochs on long documents, from a drafter trained on short ones.
#
#   examples/finetune_long_context.sh drafter long-prompts.jsonl
#
# Not run by us at this size. The paper fine-tunes a 4K drafter on 1,600 samples of LongAlign-10K for 3 epochs and
# reports tau at 16K tokens rising from 3.6 to 6.0 on its QA tasks. A step's cost grows with the context only by the
# target's pass and by attention (bench/bench_training_step.py), because the number of blocks stays the same.
set -euo pipefail
drafter=$1 prompts=$2 target=${TARGET:-Qwen/Qwen3-8B} work=${WORK:-long-context}

vllm-dflash regenerate --target "$target" --data "$prompts" --output "$work/answers.jsonl" \
  --max-tokens 1024 --max-length 32768 --batch-size 32

vllm-dflash train --target "$target" --data "$work/answers.jsonl" --output "$work/run" \
  --from-pretrained "$drafter" --max-length 32768 --max-anchors 512 \
  --lr 1e-4 --epochs 3 --batch-size 1 --accumulation-steps 8 --eval-steps 100 --checkpoint-steps 100

vllm-dflash export --checkpoint "$work/run/best" --output "$work/drafter" --target "$target"
