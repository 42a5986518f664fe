"""The loss against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from prorld.train.shapes import LearnSettings

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.real

SETTINGS = LearnSettings(clip_low=0.2, clip_high=0.28, importance_max=2.0)


def judged(ratios, advantages, *, importance=1.0, settings=SETTINGS):
    """The loss of tokens that became ``ratios`` times as likely, each of weight 1, and the gradient there."""
    from prorld.train.loss import policy_loss  # noqa: PLC0415 # torch may be missing

    start = torch.full((len(ratios),), -1.0)
    now = (start + torch.tensor([math.log(ratio) for ratio in ratios])).requires_grad_()
    loss = policy_loss(
        now=now,
        start=start,
        recorded=start - math.log(importance),
        advantages=torch.tensor(advantages),
        weights=torch.ones(len(ratios)),
        settings=settings,
    )
    loss.loss.backward()
    return float(loss.loss.detach()), now.grad.tolist(), loss.clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, 0),
        (1.0, -2.0, 2.0, 2.0, 0),
        # Good tokens may become likelier by 28 %, no more.
        (1.27, 1.0, -1.27, -1.27, 0),
        (1.5, 1.0, -1.28, 0.0, 1),
        # Bad ones may become rarer by 20 %.
        (0.81, -1.0, 0.81, 0.81, 0),
        (0.5, -1.0, 0.8, 0.0, 1),
        # What went the wrong way is always pulled back.
        (0.5, 1.0, -0.5, -0.5, 0),
        (1.5, -1.0, 1.5, 1.5, 0),
    ],
)
def test_the_clip_is_higher_above(ratio, advantage, loss, gradient, clipped):
    """DAPO's two bounds, and which side of them has a gradient."""
    found = judged([ratio], [advantage])
    assert found[0] == pytest.approx(loss)
    assert found[1] == pytest.approx([gradient])
    assert found[2] == clipped


@pytest.mark.parametrize(("importance", "weighs"), [(0.5, 0.5), (1.9, 1.9), (7.0, 2.0)])
def test_what_the_engine_sampled_otherwise_is_weighed_and_cut_off(importance, weighs):
    """The importance weight scales loss and gradient, up to its bound, and is no part of the clip."""
    loss, gradient, clipped = judged([1.0], [1.0], importance=importance)
    assert (loss, gradient, clipped) == (pytest.approx(-weighs), pytest.approx([-weighs]), 0)


def test_tokens_are_summed_up():
    """Their weights make a mean of it."""
    assert judged([1.0, 1.5, 0.5], [1.0, 1.0, -1.0])[0] == pytest.approx(-1 - 1.28 + 0.8)
