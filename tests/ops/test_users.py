"""Whom sandboxes run as."""

from __future__ import annotations

import pytest

from prorld.errors import ConfigError
from prorld.ops.users import sandbox_user


def test_an_ordinary_daemon_keeps_its_user():
    """Only root has to step down."""
    assert sandbox_user("nobody", uid=1000) is None


def test_root_steps_down_by_name_or_number():
    """The account is found by its name and by its number, and is the same one."""
    found = sandbox_user("nobody", uid=0)
    assert found is not None
    assert found[0] != 0
    assert sandbox_user(str(found[0]), uid=0) == found


@pytest.mark.parametrize("name", ["no-such-user-here", "4294967290", "root", "0", "00", "99999999999999999999"])
def test_who_is_nobody_or_root_is_refused(name):
    """A user that is not there, and root under any of its names."""
    with pytest.raises(ConfigError, match=r"sandbox\.user"):
        sandbox_user(name, uid=0)
