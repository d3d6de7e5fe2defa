"""Switches Triton's interpreter on for the tests in this folder, and for nothing else.

Triton decides twice whether a kernel is compiled or interpreted: for its own library when
`triton.language` is first imported, and for each kernel at its `@triton.jit`. Both must agree, so
the switch is thrown here, which pytest imports before the test modules beside it. The environment
is put back afterwards: processes that other tests start are not interpreted.

TRITON_INTERPRET=0 in the environment leaves it off: then the same tests compile the kernels and run
them on the CUDA device (a minute or more of compilation for each test).
"""

import os

import pytest
import torch


def _interpret() -> None:
    given = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
    finally:
        if given is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = given
    if not isinstance(tl.sum, InterpretedFunction):
        raise pytest.UsageError(
            "Triton was imported, not interpreted, before tests/kernels was collected: a test"
            " outside this folder must not import common.engine.kernels into pytest's process"
        )
    # From here on the module's own setting counts, for kernels and for test modules with kernels.
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True


if os.environ.get("TRITON_INTERPRET") != "0":
    _interpret()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The reference's products are tiny, too."""
    torch.set_num_threads(1)
