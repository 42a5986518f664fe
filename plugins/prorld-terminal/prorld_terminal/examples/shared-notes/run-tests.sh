#!/bin/bash
# No Python needed: a few checks, told as the parser named in task.yaml reads them.
lines=()

check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@"; then lines+=("PASSED checks::$name"); else lines+=("FAILED checks::$name"); fi
}

modes() { [ "$(find /app/notes -type "$1" ! -perm "$2")" = "" ]; }
empty() { [ "$(find /app/notes -type f -empty)" = "" ]; }
kept() { [ "$(cat /app/notes/plan.txt /app/notes/today.txt /app/notes/old/year.txt)" = $'Walk more.\nBuy bread.\nIt rained.' ]; }

check files modes f 644
check directories modes d 755
check no_empty_files empty
check notes_are_kept kept

echo "=========== short test summary info ==========="
printf '%s\n' "${lines[@]}"
