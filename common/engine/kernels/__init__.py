"""GPU kernels in Triton and their typed launchers: the only room with `triton`.

A module holds kernels and a function that launches them on tensors it is given; it keeps no state.
It runs wherever Triton does: on a GPU or, under TRITON_INTERPRET=1, on a CPU, slowly and for tests.
Nothing of a node that computes on a CPU may import from here.
"""

import os

# What an expression with a product and a sum may be contracted to; Triton 3.9 warns that its next
# release changes what it takes if nothing is said. Kernels here do not depend on it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
