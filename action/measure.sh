#!/usr/bin/env bash
# Measure $OVERRIDES, compare with the baseline $BASELINE, and write the report; the job is decided by a later step.
#
# Outputs: `report`, the Markdown file; `code`, the exit code of the comparison, empty where there was no baseline yet;
# `saved`, whether there is a new baseline. Exits with 2 after a mistake in the inputs.
set -euo pipefail
sweep=guard-${GITHUB_RUN_ID:-0}-${GITHUB_RUN_ATTEMPT:-0}
report=attn-exp-$BASELINE.md
# Words between spaces and line breaks; unlike an unquoted expansion, this reads no pattern as files.
read -r -d '' -a overrides <<<"$OVERRIDES" || true
attn_exp() { "$PYTHON" -m attn_exp "$@"; }

if [[ $SAVE != true && $SAVE != false ]]; then
    echo "attn-exp: save is neither true nor false: $SAVE" >&2
    exit 2
fi
measured=0
attn_exp run -m "${overrides[@]}" sweep="$sweep" || measured=$?
# A sweep with jobs that failed is compared, too: they are lost cells. One without a record is a mistake in the inputs.
compgen -G "multirun/$sweep/*/record.json" >/dev/null || exit "$((measured > 0 ? measured : 2))"

code=
if [[ -d baselines/$BASELINE ]]; then
    code=0
    attn_exp compare "$sweep" against="$BASELINE" fail_if_slower="$MARGIN" undecided="$UNDECIDED" \
        format=markdown rows=20 out="$report" || code=$?
    # What cannot be compared has no report.
    if ((code == 2)); then exit 2; fi
else
    attn_exp compare "$sweep" format=markdown rows=20 out="$report"
fi
saved=false
# Not after a regression: it would be found once and be the baseline from then on.
if [[ -z $code || ($SAVE == true && $code == 0) ]]; then
    attn_exp compare "$sweep" save="$BASELINE" rows=1 >/dev/null
    saved=true
fi
{
    echo "report=$report"
    echo "code=$code"
    echo "saved=$saved"
} >>"$GITHUB_OUTPUT"
cat "$report" >>"$GITHUB_STEP_SUMMARY"
