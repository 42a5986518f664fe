"""What SWE-bench's own grader says of logs. Run by the Python of .tools/swebench: a file of JSON in, one line out.

In: a list of {"row", "log"}; out: a list of {"status", "f2p", "p2p"}.
"""

import json
import sys
import tempfile
from pathlib import Path

from swebench.harness.constants import FAIL_TO_PASS, PASS_TO_PASS
from swebench.harness.grading import get_eval_tests_report, get_logs_eval, get_resolution_status
from swebench.harness.utils import make_test_spec

SCRIPT = "#!/bin/bash\n: '>>>>> Start Test Output'\npython -m pytest -rA\n: '>>>>> End Test Output'\n"


def main() -> None:
    """Judge each log as the harness does after a run."""
    pairs = json.loads(Path(sys.argv[1]).read_text())
    said = []
    for pair in pairs:
        more = {"log_parser": "parse_log_pytest", "eval_type": "pass_and_fail", "eval_script": SCRIPT, "image": "none"}
        spec = make_test_spec({**pair["row"], **more, "environment_setup_commit": ""})
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as log:
            log.write(pair["log"])
            log.flush()
            outcomes, found = get_logs_eval(spec, log.name)
        expected = {FAIL_TO_PASS: spec.FAIL_TO_PASS, PASS_TO_PASS: spec.PASS_TO_PASS}
        report = get_eval_tests_report(outcomes, expected)
        status = get_resolution_status(report) if found else "no log"
        counts = {name: [len(report[key][word]) for word in ("success", "failure")] for name, key in
                  (("f2p", FAIL_TO_PASS), ("p2p", PASS_TO_PASS))}  # fmt: skip
        said.append({"status": status, **counts})
    sys.stdout.write("\n" + json.dumps(said) + "\n")


main()
