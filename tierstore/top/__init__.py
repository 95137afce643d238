"""`tierstore top`: a running job on a terminal, from the file that its policy's `monitor` names."""
