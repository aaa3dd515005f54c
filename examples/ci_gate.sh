#!/usr/bin/env bash
# ci_gate.sh BASELINE [KEY=VALUE ...]: measure again, and fail if a cell is 3 % slower than in BASELINE or more.
#
# BASELINE is the name of a sweep in multirun/, or its path: keep it on the machine, or fetch it from a store. The first
# run creates it. Exit codes are those of attn-exp compare: 1 is a regression. The variable GATE sets another limit.
set -euo pipefail
baseline=$1
shift
choices=(-m backend=flash,math batch=1,2 seq_len=256 "$@")

if [[ ! -d $baseline && ! -d multirun/$baseline ]]; then
    exec python -m attn_exp "${choices[@]}" sweep="$baseline"
fi
now=gate-$(date +%Y-%m-%d_%H-%M-%S)-$$
python -m attn_exp "${choices[@]}" sweep="$now" stop_on='[inaccurate,wrong_kernel]'
# The first command writes a report for the pull request, the second one decides.
python -m attn_exp compare "$now" against="$baseline" out=gate.md
python -m attn_exp compare "$now" against="$baseline" fail_if_slower="${GATE:-3%}"
