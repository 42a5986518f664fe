#!/bin/bash
# The repository's own configuration could run programs: only its objects and references are looked at by a git that reads
# no configuration but its own, and the working tree is compared file by file.
project=/app/project
copy=$(mktemp -d)
mkdir -p "$copy/objects" "$copy/refs/heads"
cp -r "$project/.git/objects/." "$copy/objects/"
printf 'ref: refs/heads/main\n' >"$copy/HEAD"
ok=1

fail() {
    echo "$1"
    ok=0
}

# A reference may lie in its own file, or among the packed ones.
tip=$(cat "$project/.git/refs/heads/main" 2>/dev/null || grep ' refs/heads/main$' "$project/.git/packed-refs" | cut -d' ' -f1)
[ "$tip" = a1a7fa20d8309ba39780bc16e1113199ef9d59a0 ] || fail "main stands on '$tip'"
[ "$(cat "$project/.git/HEAD")" = 'ref: refs/heads/main' ] || fail 'main is not checked out'
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_DIR=$copy
count=$(git rev-list --count a1a7fa20d8309ba39780bc16e1113199ef9d59a0) || fail 'commits are lost'
[ "$count" = 3 ] || fail "there are '$count' commits"
[ "$(cat "$project/list.txt")" = $'milk\nbread\nsalt' ] || fail 'list.txt is not as it was committed'
[ "$(cat "$project/notes/shop.txt")" = 'Ask for a receipt.' ] || fail 'notes/shop.txt is not as it was committed'
[ "$(cd "$project" && find . -name .git -prune -o -type f -print | sort | tr '\n' ' ')" = './list.txt ./notes/shop.txt ' ] ||
    fail 'other files are in the working tree'
# An index is there, and is that of the last commit.
wanted=$(GIT_INDEX_FILE=$project/.git/index git ls-files --stage | cut -f2 | tr '\n' ' ')
[ "$wanted" = 'list.txt notes/shop.txt ' ] || fail "the index has: $wanted"

echo $ok >/logs/verifier/reward.txt
