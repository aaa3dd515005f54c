#!/usr/bin/env bash
# ci_gate.sh BASELINE [KEY=VALUE ...]: measures again, and fails if a cell is slower than BASELINE by 3 % or more.
#
# BASELINE is the name of a sweep in multirun/, or its path: keep it with the machine, or fetch it from a store. The
# first run makes it. Exit codes are those of python -m attn_exp.compare: 1 is a regression. GATE sets another limit.
set -euo pipefail
baseline=$1
shift
choices=(-m backend=flash,math batch=1,2 seq_len=256 "$@")

if [[ ! -d $baseline && ! -d multirun/$baseline ]]; then
    exec python -m attn_exp "${choices[@]}" sweep="$baseline"
fi
now=gate-$(date +%Y-%m-%d_%H-%M-%S)-$$
python -m attn_exp "${choices[@]}" sweep="$now" stop_on='[inaccurate,wrong_kernel]'
# For the pull request; the next one decides.
python -m attn_exp.compare sweep="$now" against="$baseline" out=gate.md
python -m attn_exp.compare sweep="$now" against="$baseline" --fail-if-slower "${GATE:-3%}"
