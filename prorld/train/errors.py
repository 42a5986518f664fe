"""What a learner refuses. Whatever it is, the weights are those from before, and the learner goes on."""

from __future__ import annotations

from prorld.errors import ProrldError

__all__ = ["LearnError", "NotFinite", "NothingToLearn", "WrongRow"]


class LearnError(ProrldError):
    """What was asked can't be done; nothing was changed."""

    code = "learn_refused"


class NothingToLearn(LearnError):
    """No advantage differs from zero, so there is no direction to go to. No step was made and none was counted."""

    code = "nothing_to_learn"


class WrongRow(LearnError):
    """A row that can't be trained on: of wrong shape, too long, or with log-probabilities of another distribution."""

    code = "wrong_row"


class NotFinite(LearnError):
    """A loss or a gradient was infinite or no number."""

    code = "not_finite"
