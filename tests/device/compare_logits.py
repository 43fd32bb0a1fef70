"""Relative RMS error and KL divergence of logits against others, position by position.

usage: compare_logits.py GOT.safetensors WANTED.safetensors
"""

import sys

import numpy as np
from safetensors.numpy import load_file

got, wanted = (load_file(path)["logits"].astype(np.float64) for path in sys.argv[1:3])
rows = min(len(got), len(wanted))
got, wanted = got[:rows], wanted[:rows]
error = np.sqrt(((got - wanted) ** 2).mean(1) / (wanted**2).mean(1))


def log_softmax(logits):
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


log_wanted = log_softmax(wanted)
divergence = (np.exp(log_wanted) * (log_wanted - log_softmax(got))).sum(1)
same = (got.argmax(1) == wanted.argmax(1)).mean()
print(
    f"{rows} positions: relative RMS error median {np.median(error):.2e}, largest {error.max():.2e} "
    f"at {error.argmax()}; KL(wanted, got) mean {divergence.mean():.2e}, median {np.median(divergence):.2e}, "
    f"largest {divergence.max():.2e} nats; same arg-max {same:.1%}"
)
