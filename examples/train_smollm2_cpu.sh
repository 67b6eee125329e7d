#!/usr/bin/env bash
# Train the drafter in examples/drafters/smollm2-135m-instruct-dflash, on a CPU, from the target's own answers.
#
#   examples/train_smollm2_cpu.sh prompts.jsonl benchmark-prompts.jsonl
#
# Measured on 2 cores of an AMD EPYC (AVX2, about 65 GFLOP/s in float32), 2026-11-30, for 2,463 examples with 545,000 answer
# tokens: features 120 tokens/s on one core (210 on both), steps of 384 blocks 3 s on one core (102 minutes of steps, in three
# runs), 6 GB of memory with 4.4 GB of features mapped, 5.9 kB of features per token on disk. tau, greedy, K = 7: mean of six
# tasks 1.82, GSM8K 2.13. More examples, not more steps, is what raises it: see bench/results/learning_curve.csv.
#
# prompts.jsonl            rows {"id", "prompt"} or {"id", "messages"}: what your users ask
# benchmark-prompts.jsonl  what acceptance is measured on; prepare refuses training prompts that overlap with it
set -euo pipefail
prompts=$(realpath "$1") benchmark=$(realpath "$2")
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
export VLLM_CPU_NUM_OF_RESERVED_CPU="${VLLM_CPU_NUM_OF_RESERVED_CPU:-0}" VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}"
work=${WORK:-$PWD/build/smollm2-drafter}
mkdir -p "$work"
target=$(vllm-dflash target smollm2)

# 1. A drafter learns what the target writes, so the target answers the prompts itself. A stopped run goes on.
vllm-dflash regenerate --target "$target" --data "$prompts" --output "$work/answers.jsonl" --max-tokens 512

# 2. Token ids, loss masks; small models fall into loops, which teach a drafter nothing.
vllm-dflash prepare --target "$target" --data "$work/answers.jsonl" --output "$work/prepared.jsonl" \
  --cut-loops --exclude "$benchmark"

# 3. Causal blocks: one drafter serves every K, and late slots can be left out of most blocks (--truncate-blocks), so
#    that the little compute goes where acceptance is decided. Starts from the bring-up drafter.
vllm-dflash train --target "$target" --data "$work/prepared.jsonl" --eval-examples 24 \
  --features "$work/features" --output "$work/run" \
  --from-pretrained examples/drafters/smollm2-135m-b8 --draft-block-size 8 --draft-vocab-size 8192 \
  --in-block-attention causal --truncate-blocks --loss-decay 2.5 \
  --soft-labels 16 --loss-negatives 1024 \
  --batch-size 4 --max-anchors 96 --lr 1e-3 --max-minutes "${MINUTES:-75}" \
  --eval-steps 300 --checkpoint-steps 300

# 4. Acceptance as it will be served, then a folder that vLLM serves, with a model card.
vllm-dflash eval --engine vllm --target "$target" --drafter "$work/run/best" --data "$benchmark" \
  --output "$work/eval.json" --save-answers "$work/benchmark-answers.jsonl"
vllm-dflash export --checkpoint "$work/run/best" --output "$work/drafter" --target "$target" \
  --eval-json "$work/eval.json"
echo "vllm serve $target --speculative-config '{\"method\": \"dflash\", \"model\": \"$work/drafter\"}'"
