"""Where the members of a group go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.backends import BackendRow, BackendState
from prorld.inference.affinity import GROUP_SLACK, GroupHomes, shared_home

ROWS = st.lists(
    st.builds(
        BackendRow,
        backend_id=st.uuids().map(str),
        leases=st.integers(0, 20),
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        state=st.sampled_from(BackendState),
    ),
    max_size=6,
)


@given(ROWS, st.data(), st.sampled_from([2.0, 4.0, 8.0]))
def test_a_home_is_up_known_and_not_much_busier(rows: list[BackendRow], data: st.DataObject, slack: float) -> None:
    """Whatever the load, a member joins only an engine of its group that is up and within the bound."""
    names = [row.backend_id for row in rows]
    homes = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    avoid = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    up = [row for row in rows if row.state is BackendState.UP]
    good = {row.backend_id for row in up if row.leases / row.weight <= min(r.leases / r.weight for r in up) + slack}
    wanted = [home for home in homes if home in good and home not in avoid]
    assert shared_home(rows, homes, slack, avoid) == (wanted[0] if wanted else None)


def test_a_whole_group_fits_onto_one_engine() -> None:
    """All eight of a group stay together beside an idle engine; a crowd does not."""

    def home(leases: int) -> str | None:
        rows = [BackendRow(backend_id="b-1", leases=leases), BackendRow(backend_id="b-2")]
        return shared_home(rows, ["b-1"], GROUP_SLACK)

    assert [home(leases) for leases in (0, 7, 8, 9)] == ["b-1", "b-1", "b-1", None]


def test_an_engine_without_places_is_no_home_while_another_is_idle() -> None:
    """Four places and four members: the next one goes to the engine that is idle, unless both are about as busy."""
    homes = ["a"]
    for leases, home in ((3, "a"), (4, None), (2, "a")):
        rows = [BackendRow(backend_id="a", leases=leases, max_inflight=4), BackendRow(backend_id="b", leases=0)]
        assert shared_home(rows, homes, 8.0) == home
    rows = [BackendRow(backend_id="a", leases=5, max_inflight=4), BackendRow(backend_id="b", leases=3)]
    assert shared_home(rows, homes, 8.0) == "a"


def test_homes_are_remembered_within_a_bound() -> None:
    """The group used longest ago is forgotten first; an engine that is gone is forgotten everywhere."""
    homes = GroupHomes(groups_max=2)
    homes.note("a", "b-1")
    homes.note("b", "b-1")
    homes.note("a", "b-2")
    homes.note("c", "b-3")
    assert (homes.of("a"), homes.of("b"), homes.of("c"), len(homes)) == (("b-1", "b-2"), (), ("b-3",), 2)
    homes.forget_backend("b-1")
    assert homes.of("a") == ("b-2",)
