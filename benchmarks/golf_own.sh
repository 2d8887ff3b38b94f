# Golf swings with an encoder that we train from scratch (docs/reproduction.md): two runs make its weights, then three arms.
#
#   bash benchmarks/golf_own.sh GOLFDATA OUT
#
# GOLFDATA has imagenette128_7k_avif.npz, golfdb96_avif.npz and, if the installed Pillow reads no AVIF, one that does in pillow/.
# OUT gets a table for each step, and metrics.tar.gz with the metrics and logs of all runs.
# Optional variables: LIMIT (seconds for each step, 1200), PICTURES and SWINGS (use only so many of each part), FIRST (options
# of the runs that make the weights), COMMON (options of the arms).
set -eu
GOLFDATA=$1 OUT=$2 WORK=${TMPDIR:-/tmp}/golf_own
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
mkdir -p "$OUT" "$WORK"
AVIF=; python -c 'import sys; from PIL import features; sys.exit(not features.check("avif"))' || AVIF=$GOLFDATA/pillow:
unpack() { PYTHONPATH=$AVIF${PYTHONPATH:-} python "benchmarks/$1_data.py" "$GOLFDATA/$2" "$WORK/$3" --jobs 8 "${@:4}"; }
unpack golf golfdb96_avif.npz golf ${SWINGS:+--swings $SWINGS} & GOLF=$!
unpack imagenette imagenette128_7k_avif.npz imagenette ${PICTURES:+--pictures $PICTURES}

paired() { # NAME SEEDS METRICS ARMS…, options of all
  local name=$1 seeds=$2 metrics=$3; shift 3
  python benchmarks/paired_runs.py "benchmarks/golf/$name.yaml" --out "$WORK/runs/$name" --jobs 9 --seeds "$seeds" \
    --limit "${LIMIT:-1200}" --metrics $metrics --arm full "$@" | sed -u "s/^/$name | /" | tee "$OUT/$name.txt"
}
of() { echo "$WORK/runs/$1/full_0/model.safetensors"; }
paired imagenette 1 top1 -- --task.data.root="$WORK/imagenette" ${FIRST:-}
wait $GOLF
paired stills 1 top1 -- --task.data.root="$WORK/golf/stills" --task.model.weights="$(of imagenette)" ${FIRST:-}
paired own 3 "map tad" --arm "work --sbp.preset=default --sbp.sampler=frames --sbp.per_sample=true --sbp.keep_ratio=0.2 --task.encoder.kept=work" \
  --arm "frozen --task.encoder.frozen=true" -- --task.data.root="$WORK/golf/swings" --task.encoder.weights="$(of stills)" ${COMMON:-}
tar -C "$WORK/runs" -czf "$OUT/metrics.tar.gz" $(cd "$WORK/runs" && find . -name metrics.jsonl -o -name log.txt)
