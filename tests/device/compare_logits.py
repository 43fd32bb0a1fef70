"""Relative RMS error of logits against others, position by position.

usage: compare_logits.py GOT.safetensors WANTED.safetensors
"""

import sys

import numpy as np
from safetensors.numpy import load_file

got, wanted = (load_file(path)["logits"].astype(np.float64) for path in sys.argv[1:3])
rows = min(len(got), len(wanted))
got, wanted = got[:rows], wanted[:rows]
error = np.sqrt(((got - wanted) ** 2).mean(1) / (wanted**2).mean(1))
same = (got.argmax(1) == wanted.argmax(1)).mean()
print(
    f"{rows} positions: relative RMS error median {np.median(error):.2e}, largest {error.max():.2e} "
    f"at {error.argmax()}, same arg-max {same:.1%}"
)
