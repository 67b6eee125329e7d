#!/usr/bin/env bash
# What can only be checked on a GPU, within 8 minutes of one: kernels compiled and tested, memory checked, timed against
# their floors, and greedy decoding with and without DFlash compared.
#
#   bench/gpu_check.sh                  results go to bench/results/
#   OUT=folder bench/gpu_check.sh       ... to a folder: kernels.csv, floors.md, tuned/, and the log of each stage
#
# A stage that fails or runs out of its time does not stop the others. Exit code: 0 all passed or could not run here
# (the summary says which), 1 a stage failed, 2 no GPU. Needs torch, triton and pytest-benchmark; vLLM if it is there.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
has_gpu() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
if ! has_gpu "$python"; then
  python=$(command -v python3 || true)
  if [[ -z $python ]] || ! has_gpu "$python"; then
    echo "gpu_check: torch finds no GPU here (neither that of .venv nor that of python3); nothing was checked."
    exit 2
  fi
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
results=${OUT:-bench/results}
logs=${OUT:-$scratch}
mkdir -p "$results"
unset TRITON_INTERPRET

# Without an installation (a bare machine), a folder of links does what pyproject.toml's package-dir does. -P keeps the
# repository root off the path, where this checkout would hide that folder.
if ! "$python" -P -c 'import vllm_dflash.triton_kernels' 2>/dev/null; then
  mkdir -p "$scratch/site/vllm_dflash"
  ln -s "$PWD"/vllm_dflash/* "$scratch/site/vllm_dflash/"
  ln -s "$PWD/triton_kernels" "$scratch/site/vllm_dflash/triton_kernels"
  export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi

summary=()
failed=0

# stage NAME SECONDS COMMAND...: its output goes to a log, whose end is shown if it fails.
stage() {
  local name=$1 seconds=$2 started=$SECONDS status
  shift 2
  echo "== $name (at most $seconds s)"
  timeout --kill-after=10 "$seconds" "$@" >"$logs/$name.log" 2>&1
  status=$?
  if [[ $status == 0 ]]; then
    summary+=("passed   $name, $((SECONDS - started)) s")
  else
    failed=1
    [[ $status == 124 || $status == 137 ]] && summary+=("TIMEOUT  $name, after $seconds s") || summary+=("FAILED   $name, exit code $status")
    tail -n 40 "$logs/$name.log"
  fi
  return 0
}

skip() { summary+=("skipped  $1: $2"); }

# Compilation ahead of time and the interpreter need no GPU; CI checks them.
stage tests 140 "$python" -P -m pytest -q tests/kernels \
  --ignore tests/kernels/test_ahead_of_time.py --ignore tests/kernels/test_interpreter.py

# Tiny shapes of every kernel. Without torch's caching allocator each tensor is an allocation of its own, so that the
# checker sees what lies just behind it.
if ! command -v compute-sanitizer >/dev/null; then
  skip memcheck "compute-sanitizer is not installed"
elif ! timeout 15 compute-sanitizer --tool memcheck "$python" -c 'import torch; torch.zeros(1, device="cuda")' &>/dev/null; then
  skip memcheck "compute-sanitizer does not support this device"
else
  stage memcheck 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$python" bench/bench_kernels.py --smoke
fi

stage bench 180 "$python" bench/bench_kernels.py --models Qwen3-8B --seconds 150 --output "$results"
grep -E '_us |Qwen3-8B' "$logs/bench.log"
"$python" bench/floors.py "$results"

if "$python" -P -c 'import sys, vllm.platforms as p; sys.exit(not p.current_platform.is_cuda_alike())' 2>/dev/null; then
  stage equality 75 "$python" bench/greedy_equality.py
else
  skip equality "there is no vLLM for this GPU"
fi

echo "== summary, results in $results"
printf '%s\n' "${summary[@]}"
exit "$failed"
