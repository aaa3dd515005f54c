#!/usr/bin/env bash
# Makes again, on one GPU, what results/<gpu>/ holds: bench/evidence.sh OUT_FOLDER STEP...
#
# Each step takes minutes at most, fails alone, and says in OUT_FOLDER/steps.txt how long it took and how it ended.
# A backend whose package is missing is `unavailable` in its tables. What measures must be committed; on a host without
# git ATTN_EXP_TREE says what `git rev-parse HEAD:attn_exp` gave where it was.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
usage="usage: bench/evidence.sh OUT_FOLDER STEP...; the steps: $(sed -n 's/^step_\([a-z0-9_]*\)() .*/\1/p' "$0" | tr '\n' ' ')"
[[ $# -ge 2 && $1 != -* ]] || { echo "$usage" >&2; exit 2; }
if git -C "$root" rev-parse -q --verify HEAD:./attn_exp >/dev/null 2>&1; then
  changed=$(git -C "$root" -c core.fsmonitor=false status --porcelain -- attn_exp conf bench) && [[ -z $changed ]] ||
    { echo "attn_exp/, conf/ or bench/ differ from the commit: commit them before they measure evidence" >&2; exit 2; }
elif [[ -z ${ATTN_EXP_TREE:-} ]]; then
  echo "this is no git checkout: set ATTN_EXP_TREE to what git rev-parse HEAD:attn_exp gives where it was committed" >&2
  exit 2
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) && shift
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# A sweep's records and table in a folder of the evidence.
keep() { # SWEEP FOLDER
  mkdir -p "$out/$2"
  cp "multirun/$1/table.txt" "$out/$2/$1.txt"
  records "$1" multirun "$out/$2"
}
# All of a sweep that commands read, as SWEEP.tar.xz.
records() { # SWEEP HOME FOLDER
  (cd "$2" && tar --sort=name --owner=0 --group=0 -c "$1"/command.txt "$1"/*/record.json) | xz -9e -T2 >"$3/$1.tar.xz"
}
attn() { python3 -m attn_exp "$@"; }

step_suite() { cd "$root"; python3 -m pytest -q -m gpu -p no:cacheprovider --durations=15 ${TESTS:-tests/gpu}; }
step_doctor() { mkdir -p "$out/doctor"; attn doctor | tee "$out/doctor/doctor.txt"; }
step_sdpa_sweep() {
  python3 "$root/bench/sdpa_sweep.py" "$out/sdpa_sweep" accumulate=true
  records one "$out/sdpa_sweep/multirun" "$out/sdpa_sweep"
}
# The same sweep by default, as it races the loop.
step_sdpa_sweep_default() {
  python3 "$root/bench/sdpa_sweep.py" "$out/sdpa_sweep_default"
  rm -r "$out/sdpa_sweep_default/multirun" "$out/sdpa_sweep_default/mlruns"
}
# The plain loop's longest calls, in which the GPU does not rest, beside the same kernels in bursts and under load.
step_sdpa_sweep_load() {
  mkdir -p "$out/sdpa_sweep_load"
  python3 "$root/bench/plain_loop.py" "$out/sdpa_sweep_load/plain.csv"
  attn -m +experiment=sdpa_sweep timer=kernel regime=burst,sustained accumulate=true seq_len=8192 sweep=load \
    save_plots=false
  keep load sdpa_sweep_load
}
step_plain() { python3 "$root/bench/plain.py" "$out/plain" ${ROWS:+--rows "$ROWS"}; }
step_plain_stall() { python3 "$root/bench/plain.py" "$out/plain_stall" --stall ${ROWS:+--rows "$ROWS"}; }
# The proof of method 5: how far three names of one kernel differ, with the records of each sweep.
step_same_kernel() {
  python3 "$root/bench/same_kernel.py" "$out/same_kernel" ${SWEEPS:-}
  for sweep in "$out"/same_kernel/multirun/*/; do
    records "$(basename "$sweep")" "$out/same_kernel/multirun" "$out/same_kernel"
  done
  rm -r "$out/same_kernel/multirun"
}
step_accuracy() { python3 "$root/bench/accuracy.py" "$out/accuracy" ${SEED:+--seed "$SEED"} --processes "${PROCESSES:-12}"; }
step_fp8_backward() { mkdir -p "$out/backends"; python3 "$root/bench/fp8_backward.py" | tee "$out/backends/fp8_backward.txt"; }
step_profilers() { python3 "$root/bench/profilers.py" "$out/profiles"; }
step_table() { attn -m +experiment=table sweep=table save_plots=false; keep table backends; }
step_cudnn_notebook() {
  attn -m +experiment=cudnn_notebook sweep=cudnn_notebook save_plots=false
  keep cudnn_notebook backends
}
# Ten implementations, then with multi-query heads in the other layout.
step_ten_way() {
  attn -m +experiment=ten_way sweep=ten_way save_plots=false
  keep ten_way backends
  attn -m +experiment=ten_way model.kv_heads=1 layout=bshd compile=none sweep=ten_way_mqa save_plots=false
  keep ten_way_mqa backends
}
step_flux() {
  attn -m +experiment=flux sweep=flux profiler.proton.lines=false save_plots=false
  keep flux backends
  mkdir -p "$out/profiles"
  cp multirun/flux/proton.hatchet "$out/profiles/flux.hatchet"
  attn explain flux >"$out/profiles/flux.txt"
}
# FLUX's two blocks, and what the whole transformer of them takes.
step_flux_blocks() {
  attn -m +experiment=flux_blocks sweep=flux_blocks save_plots=false
  keep flux_blocks backends
  python3 "$root/bench/whole_dit.py" multirun/flux_blocks | tee "$out/backends/whole_dit.txt"
}
# Decoding from paged caches, and what pages and their order cost.
step_serving() {
  attn -m +experiment=serving sweep=serving save_plots=false
  keep serving serving
}
step_decode_model() { mkdir -p "$out/serving"; python3 "$root/examples/decode_model.py" | tee "$out/serving/decode_model.txt"; }
step_compile() {
  attn -m +experiment=compile ${BACKENDS:+"backend=$BACKENDS"} sweep=compile save_plots=false
  keep compile backends
}
# torch.utils.benchmark.Timer and the sum of kernels beside our own timing, and orders of preference.
step_options() {
  local shape=(model=sdpa_bench batch=4 seq_len=2048 dtype=bf16 causal=true save_plots=false)
  attn -m backend=flash,cudnn timer=auto,benchmark,kernel sweep=timers "${shape[@]}"
  attn -m backend=priority 'backend.order=[flash,math],[cudnn,flash],[math,efficient,flash]' sweep=priority "${shape[@]}"
  keep timers backends
  keep priority backends
}
step_numerics() { attn -m +experiment=numerics sweep=numerics; keep numerics numerics; }
step_cases() {
  local name
  for name in ${CASES:-determinism precision}; do
    attn -m "+experiment=$name" "sweep=$name" stopping=quick save_plots=false
    keep "$name" cases
  done
}
step_duel() {
  mkdir -p "$out/backends"
  attn duel a=cudnn_graph b=cudnn c=cudnn_graph c.api=wrapper c.layout=bshd batch=4 seq_len=4096 model=sdpa_bench \
    causal=false | tee "$out/backends/duel_cudnn_full.txt"
}
# What a dispatch table is worth at random shapes, and duels of models: forty minutes for the table, five minutes for
# the shapes (BUDGET=290), then the duels. A second call with the same OUT_FOLDER keeps the table.
step_pick_proof() { python3 "$root/bench/pick_proof.py" "$out/pick_proof" --budget-s "${BUDGET:-290}"; }
# The figures that contradict each other, judged by one sweep: on an H100 with a verdict, elsewhere with the ratio.
step_contradictions() {
  attn -m +experiment=contradictions sweep=contradictions save_plots=false
  keep contradictions backends
  for source in sage_attention_h100 flash_attention_readme_h100 thunderkittens_h100 tritonbench_1254_h100 \
    tritonbench_1267_h100; do
    attn reproduce "$source" sweep=contradictions format=csv | tee "$out/backends/contradictions-$source.csv"
  done
}
# Sweeps of another host, measured again: SWEEPS="ARCHIVE ..." ROWS=20.
step_confirm() {
  mkdir -p "$out/confirmed"
  local archive name
  for archive in ${SWEEPS:?the archives to confirm}; do
    name=$(basename "$archive" .tar.xz)
    attn reproduce "$root/$archive" rows="${ROWS:-20}" save_plots=false
    mv "multirun/reproduce-$name" "multirun/${name}_elsewhere"
    keep "${name}_elsewhere" confirmed
    attn reproduce "$root/$archive" sweep="${name}_elsewhere" | tee "$out/confirmed/${name}_rows.txt"
  done
}
# Published figures, by default all of an H200's: FIGURES="SOURCE ..." WHERE=EXPRESSION. A source may have none to measure.
step_reproduce() {
  mkdir -p "$out/reproduce"
  local name
  for name in ${FIGURES:-$(basename -s .yaml "$root"/published/*_h200.yaml)}; do
    attn reproduce "$name" ${WHERE:+where="$WHERE"} save_plots=false
    [[ -d multirun/reproduce-$name ]] || continue
    mv "multirun/reproduce-$name" "multirun/$name"
    keep "$name" reproduce
    attn reproduce "$name" sweep="$name" | tee "$out/reproduce/${name}_rows.txt"
  done
}
# The version of flash-attn-4 from which on a case is slower, from a folder of wheels where there is no index. Ends that
# do not differ, and what stays undecided, are answers, too.
step_bisect() {
  local ends=("good=flash-attn-4==${GOOD:-4.0.0b3}" "bad=flash-attn-4==${BAD:-4.0.0b36}") code=0
  mkdir -p "$out/bisect"
  attn bisect "${ends[@]}" ${WHEELS:+wheels="$WHEELS"} state="$out/bisect" backend=fa4 ${CASE:-model=llama3_8b} \
    >"$out/bisect/bisect.txt" || code=$?
  cat "$out/bisect/bisect.txt"
  ((code <= 1)) || exit "$code"
}
# A transformer block compiled as one graph, its generated kernels and their counters.
step_dit_block() {
  attn model=flux workload=dit_block backend=cudnn compile=default profiler='[torch,ncu,inductor]' sweep=dit_block \
    isolation.timeout_s=300 profiler_timeout_s=300 save_plots=false
  block dit_block
}
step_decoder_layer() {
  attn model=llama3_8b workload=decoder_layer backend=cudnn compile=default align=top_left \
    profiler='[torch,ncu,inductor]' sweep=decoder_layer isolation.timeout_s=300 profiler_timeout_s=300 save_plots=false
  block decoder_layer
}
block() { # SWEEP
  keep "$1" profiles
  attn explain "$1" | tee "$out/profiles/$1-explain.txt"
  cd "multirun/$1"
  tar czf "$out/profiles/$1-files.tgz" --exclude='*.ncu-rep' --exclude=trace.json ./*/record.json ./*/profiles
}

[[ -z ${WHEELS:-} ]] || WHEELS=$(realpath "$WHEELS")
work=$(mktemp -d) && cd "$work" && trap 'rm -rf "$work"' EXIT
failed=0
for step in "$@"; do
  [[ $(type -t "step_$step") == function ]] || { echo "there is no step $step; $usage" >&2; exit 2; }
done
for step in "$@"; do
  began=$SECONDS
  # In a shell of its own that ends at the first failure.
  (set -e; "step_$step") >"$out/$step.log" 2>&1
  code=$?
  [[ $code == 0 ]] || failed=1
  echo "$step: exit $code, $((SECONDS - began)) s" | tee -a "$out/steps.txt"
  tail -n "${TAIL:-6}" "$out/$step.log"
done
exit "$failed"
