"""``prorld train`` with a learner that has no weights, on a file of settings; ends with what it used, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from prorld.cli.train import StopFlag, exit_of_end
from prorld.cli.train_screen import screen_of
from prorld.client import Client
from prorld.client.find import state_dir
from prorld.train.loop import Trainer
from prorld.train.run_config import read_settings
from tests.train.fake_learner import FakeLearner


def main() -> None:
    settings = read_settings(sys.argv[1], {})
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    learner = FakeLearner()
    with Client(patience_s=600.0) as client, StopFlag() as stop, screen_of(settings, as_json=True) as screen:
        end = Trainer(settings, client, learner, screen, should_stop=stop, state_dir=state_dir()).run()
    sys.stdout.write(json.dumps({"why": end.why, "steps": learner.step_count, "used": learner.used}) + "\n")
    sys.exit(exit_of_end(end))


if __name__ == "__main__":
    main()
