#!/bin/bash
# The contest on one GPU: contest.sh "CALL CALL…" DATA.npz OUT [SECONDS]
# docs/study/running.md says which calls there are and what they decide, docs/study/contest.md what is missing. They run
# one after the other until SECONDS are over. Started again with the same OUT they go on: finished runs are not repeated,
# stopped ones continue from OUT/states if the folder is still there. All calls with one OUT must have the same recipe.
# BEFORE: a .tgz of an earlier machine's results, unpacked if OUT has none. PACK: a .tgz to write all results to.
set -e
calls=$1 data=$2 out=$3 end=$((SECONDS + ${4:-540})) jobs=${JOBS:-12}
export PYTHONPATH="$(cd "$(dirname "$0")/.." && pwd)/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 TORCHINDUCTOR_CACHE_DIR=${TMPDIR:-/tmp}/inductor
export CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/mps CUDA_MPS_LOG_DIRECTORY=${TMPDIR:-/tmp}/mps
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$out"
# Processes that were killed may leave an MPS server that does not work any more, so every call starts its own.
echo quit -t 5 | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1 || true
nvidia-cuda-mps-control -d 2>/dev/null || true
if [ -f "$BEFORE" ] && ! ls "$out"/*.jsonl >/dev/null 2>&1; then tar xzf "$BEFORE" -C "$out"; fi
pack() { [ -z "$PACK" ] || tar czf "$PACK" -C "$out" --exclude=states --exclude=weights .; }
trap pack EXIT
more=(${OPTIONS:-}) # for a trial at toy size: --size toy --eager --batch 16
study() {
  local left=$((end - SECONDS))
  [ $left -gt 30 ] || { echo "$1: no time left"; return 0; }
  "${PYTHON:-python3}" -m torchsbp study "$@" --data "$data" --out "$out" --jobs "$jobs" --seconds "$left" "${more[@]}"
}

short=${SHORT:-vit 4,8;hybrid 4,8;convnext 4,8;convnext2 4,8;swin 4,8}
epochs=${EPOCHS:-hybrid 8,16,32;convnext 8,16,32;swin 8,16,32}
first="full;exact;balanced 0.5;own rows 0.5;own rows 0.25;patches ½;down exact, balanced 0.5;down exact, own rows 0.75;down exact, own rows 0.5"
others="grid 0.5;mlp rows 0.25;batch ½;down exact 0.5;down exact, rows 0.5"
timed=${TIMED:-$first;$others;checkpoint}
decided=${ARMS:-full;own rows 0.5;down exact, own rows 0.5}
models=${MODELS:-hybrid,convnext}

for call in $calls; do
  echo "== $call, $((end - SECONDS)) s left"
  case $call in
    rates) study contest --models "$models" --arms full --epochs "$short" --lr 0.5,1,2 ;;
    screen) study contest --models "$models" --arms "$first" --epochs "$short" --tuned --seeds 2 ;;
    others) study contest --models "$models" --arms "$others" --epochs "$short" --tuned --seeds 2 ;;
    speed) study speed --models "$models" --arms "$timed" ;;
    tune)
      study contest --models "$models" --arms "$decided" --epochs "$short" --tuned --lr 0.5,1,2 --seeds 2
      study contest --models "$models" --arms "$decided" --epochs "$short" --tuned --drop-path 0.1 --seeds 2
      ;;
    decide) study contest --models "$models" --arms "$decided" --epochs "$epochs" --tuned --seeds "${SEEDS:-5}" ;;
    stem) study contest --models convnext,convnext2 --arms "full;grid 0.5;down exact, balanced 0.5" --epochs "$short" --seeds 2 ;;
    gradients) study gradients --models vit,convnext,swin --epochs 3 --masks 12 --eager ;;
    papers) study accuracy --models vit --epochs 24 --seeds 2 ;;
    along) study trajectory --models vit,convnext --epochs 12 --eager ;;
    *) echo "unknown call $call; see the file" >&2; exit 2 ;;
  esac
done
