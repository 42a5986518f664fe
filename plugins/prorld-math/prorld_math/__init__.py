"""Mathematics with checked answers."""

from prorld_math.instance import MathInstance, examples

__all__ = ["MathInstance", "examples"]
