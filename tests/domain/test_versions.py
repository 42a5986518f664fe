"""Labels of weights and what they mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.policy import is_stale
from prorld.domain.versions import PolicyVersion, adapter_name, deciding, parse_label


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**18 - 1))
def test_our_labels_read_back(epoch: int, version: int) -> None:
    """Every version survives the way through an engine."""
    assert parse_label(PolicyVersion(epoch, version).label) == PolicyVersion(epoch, version)


@pytest.mark.parametrize("policy", ["default", "second", "a.b-c_1"])
def test_the_name_of_an_adapter_reads_back(policy: str) -> None:
    """Its tokens have its version, whose ever it is; no two policies have the same name for one."""
    version = PolicyVersion(1, 2)
    assert parse_label(adapter_name(policy, version)) == version
    assert (adapter_name(policy, version) == version.label) == (policy == "default")


@pytest.mark.parametrize(("label", "version"), [("default", 0), (None, 0), ("12", 12)])
def test_words_of_engines_and_bare_numbers(label: str | None, version: int) -> None:
    """Weights that were never updated are the first version; a bare number is itself."""
    assert parse_label(label) == PolicyVersion(0, version)


@given(st.text(max_size=30).filter(lambda text: not text.isdigit()))
def test_foreign_labels_mean_nothing(label: str) -> None:
    """A label that we did not write is never taken for a version."""
    if label not in ("default", "base") and not label.startswith("prorld-"):
        assert parse_label(label) is None


VERSIONS = st.builds(PolicyVersion, st.integers(0, 2), st.integers(0, 6))


@given(st.lists(VERSIONS, max_size=12), st.lists(st.integers(0, 6), min_size=2, max_size=2), st.integers(0, 8))
def test_those_that_decide_say_what_all_say(sampled: list[PolicyVersion], rollbacks: list[int], allowed: int) -> None:
    """Also of one that is above the version of a rollback and is neither the oldest nor the newest of all."""
    now = PolicyVersion(2, 6)
    assert is_stale(deciding(sampled), now, rollbacks, allowed) == is_stale(sampled, now, rollbacks, allowed)
