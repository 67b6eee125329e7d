#!/usr/bin/env bash
# Serve the embedded demo target with DFlash on http://127.0.0.1:8000; ask it with examples/openai_client.py.
# Arguments are passed on to `vllm serve`, for example: examples/serve.sh --port 9000
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
export VLLM_CPU_NUM_OF_RESERVED_CPU="${VLLM_CPU_NUM_OF_RESERVED_CPU:-0}" # vLLM would leave one core idle
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" # GiB; vLLM would take nearly all memory

exec vllm serve "$(vllm-dflash target smollm2)" \
  --served-model-name smollm2 \
  --host 127.0.0.1 --port 8000 \
  --max-model-len 2048 --max-num-seqs 8 \
  --enforce-eager \
  --speculative-config '{"method": "dflash", "model": "examples/drafters/smollm2-135m-instruct-dflash", "num_speculative_tokens": 3}' \
  "$@"
