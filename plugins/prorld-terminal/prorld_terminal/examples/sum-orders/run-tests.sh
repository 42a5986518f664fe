#!/bin/bash
python3 -m pytest -p no:cacheprovider -rA "$TEST_DIR/check_totals.py"
