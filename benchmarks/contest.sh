#!/bin/bash
# The contest on one GPU, a call at a time: contest.sh CALL DATA.npz OUT [SECONDS]
# docs/study/README.md says which calls there are, what they answer, and how long they take. A call that is started again
# with the same OUT goes on. Calls of one OUT have the same recipe; results of several machines are put together by
# copying their *.jsonl into one folder (`cat`, file by file).
set -e
call=$1 data=$2 out=$3 seconds=${4:-520} jobs=${JOBS:-12}
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 TORCHINDUCTOR_CACHE_DIR=${TMPDIR:-/tmp}/inductor
export CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/mps CUDA_MPS_LOG_DIRECTORY=${TMPDIR:-/tmp}/mps
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$out"
nvidia-cuda-mps-control -d 2>/dev/null || true
more=(${OPTIONS:-}) # for a trial at toy size: --size toy --eager --batch 16 --images 64
study() { python -m torchsbp study "$@" --data "$data" --out "$out" "${more[@]}"; }

vit="full;grid 0.5;balanced 0.5;rows 0.5;own rows 0.5;own rows 0.25;mlp rows 0.25;patches ½;batch ½"
convnext="full;grid 0.5;balanced 0.5;down exact 0.5;down exact, balanced 0.5;down exact, rows 0.5;down exact, own rows 0.5"
swin="full;grid 0.5;balanced 0.5;rows 0.5;own rows 0.5"
timed="full;exact;checkpoint;batch ½;patches ½;grid 0.5;own rows 0.5;own rows 0.25;mlp rows 0.25;down exact, own rows 0.5"
decided="full;own rows 0.5;own rows 0.25;down exact, own rows 0.5"
length=${EPOCHS:-20}
longer="$length,$((2 * length)),$((4 * length))"

case $call in
  gradients) study gradients --models vit,convnext,swin --epochs 3 --masks 12 --eager --jobs "$jobs" --seconds "$seconds" ;;
  recipe) study contest --models "${MODELS:-vit,convnext,swin}" --arms full --epochs "$longer" --lr 0.5,1,2 --jobs "$jobs" --seconds "$seconds" ;;
  screen) study contest --models vit,convnext --arms "$vit;$convnext" --epochs "$length" --seeds 2 --jobs "$jobs" --seconds "$seconds" ;;
  swin) study contest --models swin --arms "$swin" --epochs "$length" --seeds 2 --jobs "$jobs" --seconds "$seconds" ;;
  stem) study contest --models convnext,convnext2 --arms "full;grid 0.5;balanced 0.5;down exact, balanced 0.5" \
    --epochs "$length" --seeds 2 --jobs "$jobs" --seconds "$seconds" ;;
  tune) study contest --models vit,convnext --arms "$decided" --epochs "$length" --lr 0.5,1,1.5 --drop-path 0,0.1 \
    --jobs "$jobs" --seconds "$seconds" ;;
  speed) study speed --models "${MODELS:-vit,convnext,swin}" --arms "$timed" --seconds "$seconds" ;;
  decide) study contest --models "${MODELS:-vit}" --arms "${ARMS:-$decided}" --epochs "$longer" --seeds "${SEEDS:-5}" \
    --jobs "$jobs" --seconds "$seconds" ;;
  papers) study accuracy --models vit --epochs "$length" --seeds 2 --jobs "$jobs" --seconds "$seconds" ;;
  along) study trajectory --models vit,convnext --epochs "$length" --jobs "$jobs" --seconds "$seconds" ;;
  *) echo "unknown call $call; see the file" >&2; exit 2 ;;
esac
