"""Update rules: one small module for each formula, and what they have in common in `base`."""

from tierstore.rules.base import NormedRule, Pieces, Rule, step_count

__all__ = ["NormedRule", "Pieces", "Rule", "step_count"]
