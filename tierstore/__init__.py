"""Train models whose optimizer state does not fit: AdamW's state on the GPU, in pinned host memory or on NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.forecast.plan import plan
    from tierstore.optimizer import TieredAdam, TieredAdamW, TieredLAMB, TieredLion, TieredSGD
    from tierstore.policy import TierPolicy
    from tierstore.tensors import TieredStore

__version__ = "0.1.0"
__all__ = ["TierPolicy", "TieredAdam", "TieredAdamW", "TieredLAMB", "TieredLion", "TieredSGD", "TieredStore", "plan"]

_MODULES = {
    "TieredAdam": "optimizer",
    "TieredAdamW": "optimizer",
    "TieredLAMB": "optimizer",
    "TieredLion": "optimizer",
    "TieredSGD": "optimizer",
    "TierPolicy": "policy",
    "TieredStore": "tensors",
    "plan": "forecast.plan",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: a policy's validation alone takes longer than all the rest."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
