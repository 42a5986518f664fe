"""Programming problems: the policy writes code, hidden tests judge it where the policy has never been."""

from prorld_code.instance import CodeInstance, examples

__all__ = ["CodeInstance", "examples"]
