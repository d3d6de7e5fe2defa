"""Every kernel compiles for GPUs that are not here, and keeps what it holds in registers.

The interpreter takes programs that a compiler refuses. Compiling needs no GPU: Triton's wheel
brings the assembler. In a process of its own, as kernels are interpreted in this one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 90, 120)
"""Ampere, Hopper, Blackwell; Ada (89) compiles as Ampere does."""


@pytest.mark.timeout(600)
def test_kernels_compile_for_every_architecture(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", *map(str, ARCHITECTURES)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" compiles ") >= len(ARCHITECTURES)
