#!/bin/bash
python3 - <<'EOF'
import json

totals = {}
for order in json.load(open("/app/orders.json")):
    cost = sum(line["count"] * line["price"] for line in order["lines"])
    totals[order["customer"]] = totals.get(order["customer"], 0) + cost
with open("/app/totals.json", "w") as file:
    json.dump(totals, file)
EOF
