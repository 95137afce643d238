"""Says before anything is reserved where state will live, whether it fits, and what a step will cost."""
