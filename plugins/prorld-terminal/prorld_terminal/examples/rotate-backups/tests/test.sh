#!/bin/bash
# Each case makes a directory, runs the script on it, and compares what is left.
work=$(mktemp -d)
failed=0

check() { # NAME KEEP WANTED FILE...
    local name=$1 keep=$2 wanted=$3 left
    shift 3
    mkdir "$work/$name"
    for file in "$@"; do : >"$work/$name/$file"; done
    if ! said=$(timeout 10 bash /app/rotate.sh "$work/$name" "$keep" 2>&1) || [ -n "$said" ]; then
        echo "$name: it failed, or printed: $said"
        failed=1
    fi
    left=$(cd "$work/$name" && printf '%s,' *)
    if [ "$left" != "$wanted" ]; then
        echo "$name: left $left, wanted $wanted"
        failed=1
    fi
}

check newest 2 'backup-2024-02-01.tar,backup-2024-03-01.tar,' \
    backup-2024-01-01.tar backup-2024-02-01.tar backup-2024-03-01.tar
check spaces 1 'backup-2024-05-02 late.tar,' 'backup-2024-05-01 early.tar' 'backup-2024-05-02 late.tar'
check few 5 'backup-2023-01-01.tar,' backup-2023-01-01.tar
check others 1 'backup-2024-01-02.tar,notes.txt,old-2020-01-01.tar,' \
    backup-2024-01-01.tar backup-2024-01-02.tar notes.txt old-2020-01-01.tar

echo $((1 - failed)) >/logs/verifier/reward.txt
