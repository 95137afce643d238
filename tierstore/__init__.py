"""Train models whose optimizer state does not fit: AdamW's state on the GPU, in pinned host memory or on NVMe."""

__version__ = "0.1.0"
