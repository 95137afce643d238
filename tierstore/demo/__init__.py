"""The main job: train a small language model on real text while its optimizer state lives in three tiers at once.

`options` says what may be chosen, `text` and `model` what is trained, `policy` where the state lives, `training` how,
and `job` runs it all; `meter` measures, `view` shows it while it runs, `summary` at the end. This file imports nothing,
so that `tierstore --help` needs no torch.
"""
