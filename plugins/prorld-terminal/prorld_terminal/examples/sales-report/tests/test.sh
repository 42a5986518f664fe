#!/bin/bash
# Runs where the agent has never been: all that comes of it is the report.
wanted='shop,pieces,total
airport,7,2870
harbour,8,3820
market,7,3130'
found=$(head -c 65536 /app/report.csv 2>/dev/null | tr -d '\r')
echo "$found"
if [ "$found" = "$wanted" ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
