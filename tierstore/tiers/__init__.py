"""The tiers: one contract, a memory tier over any device, a file tier over swap files."""

from tierstore.tiers.base import Tier
from tierstore.tiers.file import FileTier
from tierstore.tiers.memory import MemoryTier

__all__ = ["FileTier", "MemoryTier", "Tier"]
