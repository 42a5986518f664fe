#!/bin/bash
find /app/store -type f | while read -r file; do
    if awk 'last == "kind: signing-key" && $0 == "status: revoked" { found = 1 } { last = $0 } END { exit !found }' "$file"
    then
        echo "$file"
    fi
done >/app/answer.txt
