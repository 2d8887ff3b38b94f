# The experiments on golf swings of docs/reproduction.md, all at once on one GPU.
#
#   bash benchmarks/golf.sh GOLFDATA OUT
#
# GOLFDATA has golfdb96_avif.npz, lite2.pt (efficientnet_lite2's weights of ImageNet) and, if the installed Pillow reads no AVIF,
# one that does in pillow/. OUT gets a table for each experiment, and metrics.tar.gz with the metrics and logs of all runs.
# Optional variables: LIMIT (seconds for all runs, 1200), SWINGS (use only so many of each part), COMMON (options of all runs).
set -eu
GOLFDATA=$1 OUT=$2 WORK=${TMPDIR:-/tmp}/golf
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
mkdir -p "$OUT" "$WORK"
AVIF=; python -c 'import sys; from PIL import features; sys.exit(not features.check("avif"))' || AVIF=$GOLFDATA/pillow:
PYTHONPATH=$AVIF${PYTHONPATH:-} python benchmarks/golf_data.py "$GOLFDATA/golfdb96_avif.npz" "$WORK" --jobs 8 ${SWINGS:+--swings $SWINGS}

paired() { # NAME JOBS SEEDS METRICS ARMS…, options of all
  local name=$1 jobs=$2 seeds=$3 metrics=$4; shift 4
  python benchmarks/paired_runs.py "benchmarks/golf/$name.yaml" --out "$WORK/runs/$name" --jobs "$jobs" --seeds "$seeds" \
    --limit "${LIMIT:-1200}" --metrics $metrics --arm full "$@" ${COMMON:-} | sed -u "s/^/$name | /" | tee "$OUT/$name.txt"
}
SBP="--sbp.preset=default --sbp.sampler=frames --sbp.per_sample=true"
FIFTH="$SBP --sbp.keep_ratio=0.2"
paired pretrained 9 3 "map tad" --arm "work $FIFTH --task.encoder.kept=work" --arm "sbp $FIFTH" --arm "frozen --task.encoder.frozen=true" \
  -- --task.data.root="$WORK/swings" --task.encoder.weights="$GOLFDATA/lite2.pt" &
SBP="--sbp.preset=paper --sbp.attention=query --sbp.per_sample=balanced --sbp.sampler=frames"
paired phases 3 5 top1 --arm "half $SBP --sbp.keep_ratio=0.5" --arm "quarter $SBP --sbp.keep_ratio=0.25" \
  -- --task.data.root="$WORK/phases" --task.model.weights="$GOLFDATA/lite2.pt" &
wait
tar -C "$WORK/runs" -czf "$OUT/metrics.tar.gz" $(cd "$WORK/runs" && find . -name metrics.jsonl -o -name log.txt)
