# The experiments on golf swings of docs/reproduction.md, all at once on one GPU.
#
#   bash benchmarks/golf.sh GOLFDATA OUT
#
# GOLFDATA has golfdb96_avif.npz, lite2.pt (ImageNet's weights of efficientnet_lite2) and, if the installed Pillow reads no AVIF,
# another one in pillow/. OUT gets a table for each experiment, and metrics.tar.gz with the metrics and logs of all runs.
# May be set: LIMIT (520 s for all runs), SWINGS (so many of each part only), COMMON (options of all runs) and SBP (options of
# recognition's arms with SBP).
set -eu
GOLFDATA=$1 OUT=$2 WORK=${TMPDIR:-/tmp}/golf
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
mkdir -p "$OUT" "$WORK"
AVIF=; python -c 'import sys; from PIL import features; sys.exit(not features.check("avif"))' || AVIF=$GOLFDATA/pillow:
PYTHONPATH=$AVIF${PYTHONPATH:-} python benchmarks/golf_data.py "$GOLFDATA/golfdb96_avif.npz" "$WORK" --jobs 8 ${SWINGS:+--swings $SWINGS}

END=$(($(date +%s) + ${LIMIT:-520}))
paired() { # NAME RECIPE JOBS SEEDS METRICS ARMS…, options of all
  local name=$1 recipe=$2 jobs=$3 seeds=$4 metrics=$5; shift 5
  python benchmarks/paired_runs.py "benchmarks/golf/$recipe.yaml" --out "$WORK/runs/$name" --jobs "$jobs" --seeds "$seeds" \
    --limit $((END - $(date +%s))) --metrics $metrics --arm full "$@" ${COMMON:-} | sed -u "s/^/$name | /" | tee "$OUT/$name.txt"
}
online() { # NAME JOBS, further options of all
  local name=$1 jobs=$2; shift 2
  paired "$name" "$name" "$jobs" 3 "map tad" --arm "sbp --sbp.preset=default --sbp.keep_ratio=0.2 --sbp.per_sample=true" \
    --arm "frozen --task.encoder.frozen=true" -- --task.data.root="$WORK/swings" "$@"
}
online pretrained 3 --task.encoder.weights="$GOLFDATA/lite2.pt" &
online scratch 5 &
FRAMES="--sbp.preset=default --sbp.sampler=frames --sbp.per_sample=true ${SBP:-}"
paired phases phases 4 5 top1 --arm "half $FRAMES --sbp.keep_ratio=0.5" --arm "quarter $FRAMES --sbp.keep_ratio=0.25" \
  -- --task.data.root="$WORK/phases" --task.model.weights="$GOLFDATA/lite2.pt" &
swin() { # pretrained on generated motions
  paired motions swin 1 1 top1 -- --task.data.source=generated --task.data.videos="${MOTIONS:-[2048, 256]}" --task.data.workers=3 \
    --epochs=5 --eval_every=5 --optimizer.lr=1e-3 --schedule.warmup_epochs=0.5
  paired swin swin 2 1 top1 --arm "quarter $FRAMES --sbp.keep_ratio=0.25" -- --task.data.root="$WORK/phases" \
    --task.model.weights="$WORK/runs/motions/full_0/model.safetensors" --task.model.new_head=true
}
swin &
wait
tar -C "$WORK/runs" -czf "$OUT/metrics.tar.gz" $(cd "$WORK/runs" && find . -name metrics.jsonl -o -name log.txt)
