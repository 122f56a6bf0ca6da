"""`memdecay doctor`: what is installed here, and whether a model can be served."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from memdecay.cli import _look, _terminal
from memdecay.errors import ModelError

EXAMPLE = "memdecay doctor --model smollm2"

_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "MEMDECAY_MODELS")


def doctor(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Load this model and say what it is.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which versions, threads and devices there are, and whether a model is supported."""
    with _terminal.results(as_json):
        result = _look_around()
        if model is not None:
            result["model"] = _examine(model)
    if as_json:
        _terminal.print_json(result)
    else:
        _show(result)


def _look_around() -> dict[str, Any]:
    import torch

    from memdecay.engine.support import FAMILIES
    from memdecay.policy.registry import available

    cuda = torch.cuda.is_available()
    return {
        **_terminal.provenance(),
        "threads": {
            "torch": torch.get_num_threads(),
            "cores": os.cpu_count(),
            **{name: os.environ.get(name) for name in _VARIABLES},
        },
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "families": dict(FAMILIES),
        "policies": available(),
        "smollm2": _find_smollm2(),
    }


def _find_smollm2() -> dict[str, Any]:
    """Say where the embedded model is, or why it is not there."""
    from memdecay.engine.loading import smollm2_path

    try:
        return {"path": str(smollm2_path()), "problem": None}
    except ModelError as error:
        return {"path": None, "problem": str(error)}


def _examine(name: str) -> dict[str, Any]:
    """Load a model, which refuses what is not supported, and describe it."""
    from memdecay.engine import load_model
    from memdecay.engine.known import describe, with_known
    from memdecay.regions import Profile

    with _terminal.progress() as progress:
        progress.add_task(f"loading {escape(name)}", total=None)
        model, tokenizer = load_model(name)
    config = model.config
    return {
        "name": name,
        "supported": True,
        "family": config.model_type,
        "layers": getattr(config, "num_hidden_layers", None),
        "kv_heads": getattr(config, "num_key_value_heads", None),
        "trained_positions": getattr(config, "max_position_embeddings", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "chat_template": tokenizer.chat_template is not None,
        "evidence": describe(with_known(Profile.default(), config)),
    }


def _show(result: Mapping[str, Any]) -> None:
    console = _terminal.out()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, version in result["versions"].items():
        table.add_row(name, version or Text("not installed", style="red"))
    if result["commit"]:
        table.add_row("commit", result["commit"])
    threads = result["threads"]
    table.add_row("threads", f"{threads['torch']} of torch, {threads['cores']} cores")
    for name in _VARIABLES:
        if threads[name] is not None:
            table.add_row(name, escape(threads[name]))
    table.add_row("device", result["device"])
    table.add_row("families", ", ".join(result["families"].values()))
    table.add_row("policies", ", ".join(result["policies"]))
    found = result["smollm2"]
    table.add_row("smollm2", Text(found["path"] or found["problem"]))
    if "model" in result:
        one = result["model"]
        verdict = _look.mark(console, True).append("supported", style="none")
        table.add_row(Text(one["name"]), verdict)
        table.add_row(
            "",
            f"{one['family']}, {one['parameters'] / 1e6:.0f} M parameters, {one['layers']} layers, "
            f"{one['dtype']} on {one['device']}, trained for {one['trained_positions']} positions",
        )
        table.add_row("", f"evidence heads: {one['evidence']}")
    console.print(table)
