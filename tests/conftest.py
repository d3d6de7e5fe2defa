"""Has Triton interpreted in pytest's process, so that `tests/kernels` need no GPU.

Triton decides twice whether a kernel is compiled or interpreted: for its own library when
`triton.language` is first imported, and for each kernel at its `@triton.jit`. Both must agree, and
torch imports Triton wherever transformers does, so the switch is thrown here, before any test
module is imported. The environment is put back: processes that tests start are not interpreted.

TRITON_INTERPRET=0 in the environment leaves it off: then the tests of kernels compile them and run
them on the CUDA device (a minute or more of compilation for each test).
"""

import importlib.util
import os


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
    assert isinstance(tl.sum, InterpretedFunction), "Triton was imported before tests/conftest.py"
    # From here on the module's own setting counts, for kernels and for test modules with kernels.
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True


# Where it is not installed only the tests of kernels fail.
if os.environ.get("TRITON_INTERPRET") != "0" and importlib.util.find_spec("triton") is not None:
    _interpret()
