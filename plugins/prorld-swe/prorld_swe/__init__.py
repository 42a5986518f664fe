"""Software engineering tasks."""

from prorld_swe.instance import SweInstance

__all__ = ["SweInstance"]
