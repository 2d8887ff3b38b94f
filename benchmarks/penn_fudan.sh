#!/bin/bash
# Penn-Fudan with a backbone of our own pre-training: full backprop against SBP, paired seeds (docs/reproduction.md).
#
#   bash benchmarks/penn_fudan.sh pretrain DATA OUT         # OUT/weights.0 and weights.1: halves in float16; 3 minutes on an H200
#   bash benchmarks/penn_fudan.sh runs DATA WEIGHTS OUT     # WEIGHTS has the halves; OUT/table.txt, runs.tar.gz, pictures; 5 minutes
#
# DATA has imagenette/{train,val}/CLASS/*.jpg, and pennfudan/ as benchmarks/detection_data.py writes it. Optional variables:
# MORE (further options of torchsbp train), LIMIT (seconds after which runs are stopped).
set -u
what=$1 data=$2
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
begin=$(date +%s)

halves='
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
given, out = Path(sys.argv[1]), Path(sys.argv[2])
if given.is_dir():
    save_file({k: v.float() for i in "01" for k, v in load_file(given / f"weights.{i}").items()}, out)
else:
    weights = {k: v.half().contiguous() for k, v in load_file(given).items()}
    for i in (0, 1):
        save_file(dict(list(weights.items())[i::2]), out / f"weights.{i}")
'

pretrain() {  # as a classifier of 4000 images in ten classes
  local out=$1; mkdir -p "$out"
  timeout -s INT "${LIMIT:-180}" python -m torchsbp train folder --out "$out/run" --task.data.root "$data/imagenette" \
    --task.model.name convnext_pico --task.model.drop_path 0.1 --task.data.size 112 --task.data.workers 12 \
    --task.augment.auto_augment null --task.augment.erase 0 --task.augment.mixup 0.2 --task.augment.cutmix 0 \
    --sbp.preset none --compile false --channels_last true --epochs 60 --batch 256 --optimizer.lr 2.0e-3 \
    --schedule.warmup_epochs 3 --eval_every 5 --log.progress false --checkpoint.keep 1 ${MORE:-} > "$out/log.txt" 2>&1
  tail -3 "$out/log.txt"
  [ -f "$out/run/model.safetensors" ] || exit 1
  grep '"valid"' "$out/run/metrics.jsonl" | tail -1 | cut -c1-300
  cp "$out/run/metrics.jsonl" "$out/metrics.jsonl"
  python -c "$halves" "$out/run/model.safetensors" "$out"
  rm -rf "$out/run"
}

runs() {
  local weights=$1 out=$2 work; work=$(mktemp -d); mkdir -p "$out"
  python -c "$halves" "$weights" "$work/pretrained.safetensors" || exit 1
  python benchmarks/paired_runs.py penn_fudan --out "$work/runs" --seeds "${SEEDS:-5}" --jobs 10 --limit "${LIMIT:-300}" --arm full \
    --arm "sbp --sbp.preset=paper --sbp.attention=query --sbp.per_sample=true --sbp.exact_downsampling=true --sbp.scale=rows" -- \
    --task.data.root="$data/pennfudan" --task.model.weights="$work/pretrained.safetensors" ${MORE:-} 2>&1 | tee "$out/table.txt"
  tail -q -n 1 "$work"/runs/*/log.txt | cut -c1-200
  tar -czf "$out/runs.tar.gz" -C "$work" --exclude "*.pt" --exclude "*.safetensors" runs  # each run has tens of MB of weights
  local images; images=$(ls "$data"/pennfudan/val/*.jpg | head -6)
  for arm in full sbp; do
    python -m torchsbp predict "$work/runs/${arm}_0" $images --out "$work/pictures_$arm" --device "${DEVICE:-cuda}" > /dev/null
  done
  tar -czf "$out/pictures.tar.gz" -C "$work" pictures_full pictures_sbp
  rm -rf "$work"
}

"$what" "${@:3}"
echo "$what: $(( $(date +%s) - begin )) s"
