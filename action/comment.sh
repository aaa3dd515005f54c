#!/usr/bin/env bash
# Post $REPORT as one comment on the pull request $PULL_REQUEST, in place of the one that an earlier run posted.
#
# A token that may not comment, as that of a fork's pull request, leaves a warning: the job's summary has the report.
set -euo pipefail
marker="<!-- attn-exp guard: $BASELINE -->"
body=$(mktemp)
# GitHub takes 65,536 characters.
{ echo "$marker" && head -c 60000 "$REPORT"; } >"$body"
comments=repos/$GITHUB_REPOSITORY/issues/$PULL_REQUEST/comments
# shellcheck disable=SC2016
find='.[] | select(.user.type == "Bot" and (.body | startswith(env.MARKER))) | .id'
if earlier=$(MARKER=$marker gh api --paginate "$comments" --jq "$find"); then
    earlier=${earlier%%$'\n'*}
    if [[ -n $earlier ]]; then
        gh api --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$earlier" --field body=@"$body" --silent && exit 0
    else
        gh api --method POST "$comments" --field body=@"$body" --silent && exit 0
    fi
fi
echo "::warning::the comparison could not be posted as a comment (permissions: pull-requests: write); the summary has it"
