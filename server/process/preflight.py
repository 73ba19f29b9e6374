"""Checks before a model is loaded: `serve` fails with one sentence instead of opening a port in vain.

The checks read files without importing anything slow. Only transformers can tell whether it knows the architecture and
whether that reads images. It is asked in a separate process (`python -m server.process.preflight`), since its imports must
not be inherited by forked workers, and only for model types that the test suite does not serve.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from server.access.ring import checked
from server.process.engine_checks import check as check_engine
from server.process.replica_checks import check as check_replicas
from server.settings import Settings, SettingsError
from server.wording import one_sentence

TESTED = frozenset(
    (
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "llava", "llava_next"),
        *("llava_onevision", "internvl", "gemma3", "gemma4", "glm4v", "idefics3", "lfm2_vl", "smolvlm", "paligemma"),
        *("mistral3", "aya_vision"),
    )
)
"""Model types that the engine is tested with, so that transformers need not be asked."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
"""Tokenizer files, at least one of which a folder must have, whichever transformers reads."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")
_GPUS = ("nvidia[0-9]*", "nvidiactl", "nvhost-gpu", "nvgpu", "kfd", "dxg")
"""Device files in /dev of NVIDIA's driver, Jetson's, AMD's and Windows' own."""
CALIBRATION = "helmsight.calibration/1"
_PARTS: dict[str, Any] = {
    **dict.fromkeys(("divergence", "sinks"), list), **dict.fromkeys(("flags", "alarm"), dict), "surprise": (int, float),
    **dict.fromkeys(("samples", "tokens", "images", "contexts"), int), "fingerprint": str, "format": str,
}  # fmt: skip
MAX_HEADER = 100_000_000
"""Largest size in bytes of a safetensors header, as the format defines it."""
ASKING_SECONDS = 120


def preflight(settings: Settings, place: bool = True) -> None:
    """Raise SettingsError for a model that cannot be served, keys that cannot be read or, with `place`, a port in use.

    The error is one sentence. A model that passes may still fail to load.
    """
    check_replicas(settings)
    check_engine(settings)
    try:
        _ = settings.keys
    except (OSError, ValueError) as error:
        raise SettingsError(f"--api-key-file {settings.api_key_file}: {_reason(error)}") from None
    if settings.named_key_file is not None:
        checked(Path(settings.named_key_file).expanduser())
    if look(settings):
        _ask_transformers(settings)
    if place:
        check_place(settings)


def look(settings: Settings) -> bool:
    """Check a model's files, the dtype and the device, and return whether transformers needs to be asked.

    Raises SettingsError.
    """
    if settings.dtype not in DTYPES:
        raise SettingsError(f"--dtype {settings.dtype[:64]!r} is unknown; use one of {', '.join(DTYPES)}")
    if not _DEVICE.fullmatch(settings.device):
        raise SettingsError(f"--device {settings.device[:64]!r} is unknown; use auto, cpu, cuda, cuda:1 and so on")
    if settings.device.startswith("cuda"):
        if for_cpu_alone():
            raise SettingsError(f"--device {settings.device}: the installed torch is built for the CPU only")
        if not sees_gpu():
            raise SettingsError(f"--device {settings.device}: torch finds no GPU on this machine")
    _check_division(settings)
    if settings.chat_template is not None and not Path(settings.chat_template).expanduser().is_file():
        raise SettingsError(f"--chat-template {settings.chat_template[:256]}: there is no such file")
    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        return _check_name(settings, folder)
    config = check_folder(folder)
    return config.get("model_type") not in TESTED or not isinstance(config.get("vision_config"), dict)


def _check_division(settings: Settings) -> None:
    """Raise SettingsError for an impossible division of a model over several devices."""
    parts = [("--device-map", settings.device_map is not None), ("--tensor-parallel", settings.tensor_parallel > 1)]
    requested = [flag for flag, is_set in parts if is_set]
    others = [("--device", settings.device != "auto"), ("--compiled", settings.compiled is True)]
    others.append(("--quantization", settings.quantization is not None))
    for flag in requested:
        for other in [*requested[1:], *(other for other, is_set in others if is_set)]:
            if other != flag:
                raise SettingsError(f"{flag} and {other} are mutually exclusive")
        if find_spec("accelerate") is None:
            raise SettingsError(f"{flag} needs accelerate: pip install 'helmsight[parallel]'")
    if settings.device_map is not None and (for_cpu_alone() or not sees_gpu()):
        raise SettingsError("--device-map spreads a model over several GPUs, and torch finds none on this machine")
    if settings.tensor_parallel > 1:
        if settings.replicas is not None:
            raise SettingsError(
                "--tensor-parallel and --replicas are mutually exclusive: start several servers instead"
            )
        started = os.environ.get("WORLD_SIZE", "none")
        if started != str(settings.tensor_parallel):
            raise SettingsError(
                f"--tensor-parallel {settings.tensor_parallel} needs as many processes: torchrun --standalone "
                f"--nproc-per-node {settings.tensor_parallel} --no-python helmsight serve ...; it has started {started}"
            )


def for_cpu_alone() -> bool:
    """Return whether the installed torch is built for CPUs only."""
    return version("torch").endswith("+cpu")


def sees_gpu() -> bool:
    """Return whether this machine has a GPU that torch might use."""
    return any(True for name in _GPUS for _ in Path("/dev").glob(name))


def check_place(settings: Settings) -> None:
    """Raise SettingsError if the host and port cannot be listened at."""
    if settings.host.startswith("unix:") or not settings.port:
        return
    host = settings.host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gunicorn does
        try:
            trial.bind((host, settings.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SettingsError(
                    f"--port {settings.port} is taken: another program listens there; stop it, or choose another port"
                ) from None
            raise SettingsError(f"--host {settings.host} --port {settings.port}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _check_name(settings: Settings, path: Path) -> bool:
    """Check a name on the hub, downloaded or to be downloaded; return whether transformers needs to be asked."""
    name = settings.model
    if path.exists():
        raise SettingsError(f"the model {name!r} is a file; a checkpoint is a folder")
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name:
        raise SettingsError(f"the model {name!r} cannot be served: there is no such folder")
    if settings.download:
        return False
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 -- only for names
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise SettingsError(
            f"the model {name!r} cannot be served: there is no such folder, and no model of that name has been downloaded "
            "from the hub; --download fetches it"
        )
    check_folder(Path(cached).parent, name)
    return True


def check_folder(folder: Path, shown: str | None = None) -> dict[str, Any]:
    """Return the config of a checkpoint with complete files; raises SettingsError naming the first damaged one."""

    def wrong(why: str) -> SettingsError:
        return SettingsError(f"the model {shown or str(folder)!r} cannot be served: {why}")

    if not (folder / "config.json").is_file():
        raise wrong("the folder has no config.json, so it is not a checkpoint")
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise wrong(f"{file.name} is damaged: {error}") from None
    config = json.loads((folder / "config.json").read_bytes())
    if not isinstance(config, dict):
        raise wrong("config.json is damaged: it holds no object")
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise wrong(
            "the folder has neither preprocessor_config.json nor processor_config.json, so the model takes no images"
        )
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise wrong("the folder has no tokenizer.json, nor a tokenizer in another format")
    if why := wrong_texts(folder):
        raise wrong(why)
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif index.is_file():
        shards = json.loads(index.read_bytes())
        shards = shards.get("weight_map") if isinstance(shards, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise wrong(f"{index.name} is damaged: it names no files")
        names = sorted(set(shards.values()))
    else:
        raise wrong("the folder has neither model.safetensors nor an index of several; other formats are not supported")
    for name in names:
        if not (folder / name).is_file():
            raise wrong(f"{name}, which {index.name} names, is missing")
        if why := damage(folder / name):
            raise wrong(f"{name} {why}")
        if why := misfit(folder / name, config):
            raise wrong(f"{name} {why}")
    return config


def wrong_texts(folder: Path) -> str | None:
    """Return the defect of a folder's tokenizer, chat template or calibration, None if there is none.

    All JSON files must be valid.
    """

    def read(name: str) -> Any:
        return json.loads((folder / name).read_bytes()) if (folder / name).is_file() else None

    tokenizer = read("tokenizer.json")
    if (folder / "tokenizer.json").is_file() and not (
        isinstance(tokenizer, dict)
        and isinstance(tokenizer.get("model"), dict)
        and isinstance(tokenizer.get("added_tokens"), list)
    ):
        return "tokenizer.json is damaged: it holds no 'model' or no 'added_tokens'"
    for name, template in templates(folder, read):
        try:
            Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        except TemplateSyntaxError as error:
            if "unknown tag 'generation'" not in str(error):  # a tag of transformers' own
                return f"{name} is not a valid template: {error.message} (line {error.lineno})"
    if (folder / "calibration.json").is_file() and (why := wrong_calibration(read("calibration.json"))):
        return f"calibration.json is not a valid calibration: {why}; create it again or remove it"
    return None


def templates(folder: Path, read: Any) -> Iterator[tuple[str, str]]:
    """Yield (file, template) of every chat template of a folder."""
    if (folder / "chat_template.jinja").is_file():
        yield "chat_template.jinja", (folder / "chat_template.jinja").read_text("utf-8", "replace")
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        content = read(name)
        if isinstance(content, dict) and isinstance(content.get("chat_template"), str):
            yield name, content["chat_template"]


def wrong_calibration(content: Any) -> str | None:
    """Return the defect of a calibration's form, None if there is none.

    Its numbers are compared with the model once that is loaded.
    """
    if not isinstance(content, dict):
        return "it holds no object"
    if content.get("format") != CALIBRATION:
        return f"its format is not {CALIBRATION!r}"
    if missing := sorted({"fingerprint", "divergence"} - content.keys()):
        return f"it has no {missing[0]!r}"
    for name, value in content.items():
        if name not in _PARTS:
            return f"it has an unknown part {name[:64]!r}"
        if value is not None and not isinstance(value, _PARTS[name]):
            return f"its part {name!r} has the wrong type"
    return None


def misfit(file: Path, config: dict[str, Any]) -> str | None:
    """Return the defect of a token embedding whose width differs from the config's, None if there is none."""
    text = config.get("text_config")
    width = (text if isinstance(text, dict) else config).get("hidden_size")
    for name, entry in header_of(file).items():
        if name.endswith("embed_tokens.weight") and entry.get("dtype") in ("F64", "F32", "F16", "BF16"):
            shape = entry.get("shape")
            if isinstance(width, int) and isinstance(shape, list) and len(shape) == 2 and shape[1] != width:
                return f"does not fit config.json: {name} is {shape[1]} wide, and 'hidden_size' is {width}"
    return None


def header_of(file: Path) -> dict[str, Any]:
    """Return the header of a complete safetensors file."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    return header


def damage(file: Path) -> str | None:
    """Return the defect of a safetensors file, by its header and its length, None if there is none."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(MAX_HEADER, size - 8):
                return "is damaged: it is not a safetensors file, or its header is truncated"
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return "is damaged: its header is not a safetensors header"
    if size < expected:
        return f"is truncated: it has {size} bytes instead of {expected}"
    return f"is damaged: it has {size} bytes instead of {expected}" if size > expected else None


def _ask_transformers(settings: Settings) -> None:
    command = [
        sys.executable,
        "-m",
        "server.process.preflight",
        settings.model,
        *(["--download"] if settings.download else []),
    ]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=ASKING_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return  # loading will report the error
    reason = completed.stdout.strip().rpartition("\n")[2]
    if completed.returncode == 1 and reason:
        raise SettingsError(f"the model {settings.model!r} cannot be served: {reason}")


def refusal(model: str, download: bool) -> str | None:
    """Return the reason for which transformers or the engine refuse a model's config, None if they accept it."""
    from transformers import AutoConfig  # noqa: PLC0415 -- takes seconds

    import steering  # noqa: PLC0415

    try:
        steering.refuse_structure(
            AutoConfig.from_pretrained(model, local_files_only=not download, trust_remote_code=False)
        )
    except Exception as error:
        return one_sentence(error)
    return None


if __name__ == "__main__":
    problem = refusal(sys.argv[1], "--download" in sys.argv[2:])
    print(problem or "")
    sys.exit(1 if problem else 0)
