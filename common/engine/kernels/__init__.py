"""GPU kernels in Triton and their typed launchers: the only room with `triton`.

A module holds kernels and a function that launches them on tensors it is given; it keeps no state.
It runs wherever Triton does: on a GPU or, under TRITON_INTERPRET=1, on a CPU, slowly and for tests.
Nothing of a node that computes on a CPU may import from here.
"""
