"""Questions of science."""

from prorld_stem.choice_instance import ChoiceInstance
from prorld_stem.stem_instance import StemInstance

__all__ = ["ChoiceInstance", "StemInstance"]
