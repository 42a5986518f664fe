#!/bin/bash
# Two kinds of cases; the reward is 1 where all of both are right.
basic=0 basic_all=0 edge=0 edge_all=0

check() { # KIND INPUT WANTED ARGUMENT...
    local kind=$1 input=$2 wanted=$3 found
    shift 3
    found=$(printf "$input" | timeout 10 /app/slug "$@" 2>/dev/null | head -c 65536)
    eval "${kind}_all=\$((${kind}_all + 1))"
    if [ "$found" = "$(printf "$wanted")" ]; then
        eval "$kind=\$(($kind + 1))"
    else
        echo "$kind: $input $*: found '$found'"
    fi
}

check basic 'Hello, World!\n' 'hello-world'
check basic 'One\nTwo 2\n' 'one\ntwo-2'
check basic '  --Trim me--  \n' 'trim-me'
check edge '!!!\n' 'untitled'
check edge 'Same\nsame!\nSAME\n' 'same\nsame-2\nsame-3'
check edge 'alpha beta gamma\n' 'alpha-beta' --max 12
check edge 'alpha beta\n' 'alpha-beta' --max 10
check edge 'alphabet\n' 'alph' --max 4
check edge 'a b c\na b d\n' 'a-b\na-b-2' --max 3
check edge '???\n' 'unt' --max 3

reward=0
[ $((basic + edge)) -eq $((basic_all + edge_all)) ] && reward=1
cat >/logs/verifier/reward.json <<EOF
{"reward": $reward, "basic": $(awk "BEGIN { print $basic / $basic_all }"), "edge": $(awk "BEGIN { print $edge / $edge_all }")}
EOF
