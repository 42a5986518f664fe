#!/bin/bash
wanted=/app/store/south/11/b.records
found=$(head -c 4096 /app/answer.txt 2>/dev/null)
echo "the answer is: $found"
if [ "$found" = "$wanted" ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
