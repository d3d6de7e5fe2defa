"""Which device and which kernels a node computes with, and what is refused."""

import logging

import pytest
import torch

from common.engine.device import choose_attention, choose_device
from common.engine.errors import DeviceError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch saw two GPUs."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA on a machine that has none."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@pytest.mark.parametrize(
    ("asked", "rank", "device"),
    [
        ("cpu", 0, CPU),
        ("cpu", 3, CPU),
        ("auto", 0, GPU),
        ("auto", 1, torch.device("cuda", 1)),
        ("cuda", 0, GPU),
        ("cuda", 1, torch.device("cuda", 1)),
        ("cuda:1", 0, torch.device("cuda", 1)),
        ("cuda:0", 1, torch.device("cuda", 1)),
    ],
)
def test_gpus_are_given_out_in_order(
    gpus: None, asked: str, rank: int, device: torch.device
) -> None:
    assert choose_device(asked, rank) == device


@pytest.mark.parametrize(
    ("asked", "rank", "message"),
    [
        ("cuda:2", 0, "device: cuda:2 needs GPU 2, and torch sees only 2 here"),
        ("cuda:1", 1, "needs GPU 2"),
        ("auto", 2, "needs GPU 2"),
        ("gpu", 0, "'gpu' is none of cpu, cuda, cuda:N, auto"),
        ("cuda:", 0, "'cuda:' is none of"),
        ("cuda:-1", 0, "'cuda:-1' is none of"),
        ("auto:1", 0, "'auto:1' is none of"),
    ],
)
def test_what_is_not_there_is_named(gpus: None, asked: str, rank: int, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        choose_device(asked, rank)


def test_auto_is_the_cpu_where_torch_sees_no_gpu(no_gpu: None) -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(DeviceError, match="device: cuda needs GPU 0, and torch sees none here"):
        choose_device("cuda")


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    with pytest.raises(DeviceError, match=r"device: cuda:3, but this torch .* computes on CPUs"):
        choose_device("cuda:3")


def found(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Whether `triton` can be imported."""
    spec = object() if there else None
    monkeypatch.setattr("common.engine.device.importlib.util.find_spec", lambda name: spec)


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("interpreter", ["", "0", "1"])
def test_which_kernels(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, there: bool, interpreter: str
) -> None:
    found(monkeypatch, there)
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    on_gpu = device.type == "cuda"
    assert choose_attention("torch", device) == "torch"
    assert choose_attention("auto", device) == ("triton" if on_gpu and there else "torch")
    if there and (on_gpu or interpreter == "1"):
        assert choose_attention("triton", device) == "triton"
    else:
        reason = "only in its interpreter" if there else "package triton is not installed"
        with pytest.raises(DeviceError, match=f"attention: triton, but .*{reason}"):
            choose_attention("triton", device)


def test_a_gpu_without_triton_is_slow_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found(monkeypatch, False)
    with caplog.at_level(logging.WARNING):
        assert choose_attention("auto", GPU) == "torch"
    assert "triton is not installed, so torch computes, more slowly" in caplog.text
