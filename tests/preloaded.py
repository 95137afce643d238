"""What the server of `processes` imports once, for all the processes that it forks; it must start no thread."""

import torch
import torch._dynamo  # which torch's optimizers import at their first step, for a second and a half

import tests.crash.training  # noqa: F401
import tierstore.io.threads  # noqa: F401

torch.set_num_threads(1)  # before the first arithmetic: of two, one would spin wherever the machine is busy
