"""Adapters in the files of Hugging Face's PEFT: a folder with adapter_config.json and
adapter_model.safetensors, which `peft.PeftModel.from_pretrained` reads.

A is `down` here and `lora_A` there, B is `up` and `lora_B`, both laid out alike. Layers
that are trained as a whole are PEFT's `modules_to_save`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from re import escape
from typing import TYPE_CHECKING, Any, TypeVar

from hpcfed.errors import UserError, one_line

if TYPE_CHECKING:  # the command line is checked without torch
    from torch import nn

    from hpcfed.models.layout import Layout

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""How every name in PEFT's file begins."""
FACTORS = {"down.weight": "lora_A.weight", "up.weight": "lora_B.weight"}
"""Our names of an adapter's factors, and PEFT's."""
OTHERS = (
    "use_dora use_rslora lora_bias rank_pattern alpha_pattern target_parameters "
    "trainable_token_indices layer_replication alora_invocation_tokens use_qalora "
    "use_bdlora arrow_config"
)
"""Settings of PEFT that make another adapter than W + (α / r) B A."""
USUAL_STARTS = ("gaussian", "orthogonal", "eva")
"""Ways to draw first adapters that leave the network below as it is."""
MOST_BYTES = 2**20
"""The largest configuration that is read."""

T = TypeVar("T")


def is_folder(path: Path | None) -> bool:
    """Tell whether a path is a folder with adapters of PEFT."""
    return path is not None and (path / CONFIG).is_file()


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says, in the words of our options."""

    rank: int
    alpha: float
    layers: str
    """Patterns of --lora-layers."""
    train: str | None
    """Patterns of --lora-train."""


def read_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json; refuse adapters other than plain LoRA."""
    stored = _json(folder / CONFIG)
    _check_plain(stored, folder)
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"--init {folder}: there is no {WEIGHTS}; adapter_model.bin would be a "
            "pickle, which is never loaded"
        )
    rank, alpha = _number(stored.get("r")), _number(stored.get("lora_alpha"))
    if rank < 1 or int(rank) != rank:
        raise UserError(
            f"--init {folder}: r in {CONFIG} must be a whole number above 0"
        )
    if alpha <= 0:
        raise UserError(f"--init {folder}: lora_alpha in {CONFIG} must be above 0")
    targets = stored.get("target_modules")
    # PEFT takes the end of a name for the whole, unless something else restricts it.
    restricted = ("layers_to_transform", "layers_pattern", "exclude_modules")
    names = targets if _are_texts(targets) else None
    if names and not any(map(stored.get, restricted)):
        layers = _endings(names)
    else:
        layers = ",".join(_adapted(folder))
    _check_rank(folder, int(rank))
    whole = stored.get("modules_to_save")
    if whole and not _are_texts(whole):
        raise UserError(
            f"--init {folder}: modules_to_save in {CONFIG} must be a list of names"
        )
    return AdapterConfig(int(rank), alpha, layers, _endings(whole) if whole else None)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _check_rank(folder: Path, rank: int) -> None:
    """Refuse a rank that the weights do not have, before anything is made of it."""
    from safetensors import safe_open

    for module in _adapted(folder):
        name = f"{PREFIX}{module}.{FACTORS['down.weight']}"
        with safe_open(folder / WEIGHTS, "np") as file:
            shape = file.get_slice(name).get_shape()
        if shape[:1] != [rank]:
            raise UserError(
                f"--init {folder}: r is {rank:,} in {CONFIG}, but {module} has rank "
                f"{shape[0] if shape else 0:,}"
            )


def _json(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            stored = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"--init {path.parent}: {path.name} cannot be read: {one_line(error)}"
        ) from None
    if not isinstance(stored, dict):
        raise UserError(f"--init {path.parent}: {path.name} must hold a JSON object")
    return stored


def _check_plain(stored: Mapping[str, Any], folder: Path) -> None:
    kind = stored.get("peft_type")
    if kind != "LORA":
        raise UserError(f"--init {folder}: peft_type is {kind}; only LORA can be read")
    if stored.get("bias", "none") != "none":
        raise UserError(
            f"--init {folder}: its adapters have biases ({stored['bias']}); only those "
            "with bias none can be read"
        )
    begun = stored.get("init_lora_weights", True)
    if isinstance(begun, str) and begun not in USUAL_STARTS:
        raise UserError(
            f"--init {folder}: init_lora_weights is {begun}, which also changes the "
            "network below; only plain LoRA can be read"
        )
    for name in OTHERS.split():
        if stored.get(name):
            raise UserError(
                f"--init {folder}: {name} is set; only plain LoRA can be read"
            )


def _number(value: Any) -> float:
    """Return a finite number; 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    try:
        return float(value) if isfinite(value) else 0.0
    except OverflowError:
        return 0.0


def _endings(names: Iterable[Any]) -> str:
    """Return patterns for modules with these names, or whose names end in them."""
    return ",".join(f"{name},*.{name}" for name in sorted(map(str, names)))


def _adapted(folder: Path) -> list[str]:
    """Return the modules that have an adapter in the file."""
    ending = f".{FACTORS['down.weight']}"
    found = []
    for name in names_in(folder / WEIGHTS):
        if name.startswith(PREFIX) and name.endswith(ending):
            found.append(name.removeprefix(PREFIX).removesuffix(ending))
    return sorted(found)


def names_in(path: Path) -> list[str]:
    """Return the names of the tensors in a file."""
    from safetensors import safe_open

    try:
        with safe_open(path, "np") as file:
            return list(file.keys())
    # The library raises an exception of its own for a file that is damaged.
    except Exception as error:
        raise UserError(
            f"--init {path.parent}: {path.name} cannot be read: {one_line(error)}"
        ) from None


def with_our_names(tensors: Mapping[str, T], folder: Path) -> dict[str, T]:
    """Return PEFT's tensors by our names."""
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise UserError(
                f"--init {folder}: {name} in {WEIGHTS} does not begin with {PREFIX}"
            )
        # PEFT writes the frozen layer, too, if it may have changed.
        own = name.removeprefix(PREFIX).replace(".base_layer.", ".base.")
        for ours, theirs in FACTORS.items():
            if own.endswith(f".{theirs}"):
                own = own.removesuffix(theirs) + ours
        found[own] = tensor
    return found


@dataclass(frozen=True)
class AdapterFiles:
    """How a run's rows are written for PEFT."""

    config: Mapping[str, Any]
    """What adapter_config.json holds."""
    names: Mapping[str, str]
    """PEFT's names of the tensors to write, by ours."""


def describe(
    network: "nn.Module", layout: "Layout", *, base: str | None, causal: bool
) -> AdapterFiles | None:
    """Describe the adapters of a network for PEFT; None if it has none, or others than
    PEFT knows. `base` is the folder of the network without them.
    """
    from hpcfed.models.lora import LoraLinear, LoraWeight

    adapters: dict[str, LoraLinear] = {}
    for name, module in network.named_modules():
        if isinstance(module, LoraWeight):
            return None
        if isinstance(module, LoraLinear):
            adapters[name] = module
    if not adapters:
        return None
    frozen = {name for name, p in network.named_parameters() if not p.requires_grad}
    names, whole = {}, []
    for e in layout.entries:
        owner = e.layer.rpartition(".")[0]
        own = e.name.removeprefix(f"{owner}.")
        if owner in adapters:
            theirs = FACTORS.get(own, own.replace("base.", "base_layer.", 1))
            names[e.name] = f"{PREFIX}{owner}.{theirs}"
        # A frozen tensor that is only sent is the base's own.
        elif e.name not in frozen:
            whole.append(e.layer)
    if "" in whole:
        return None  # the network's own tensor, of no layer that PEFT could save
    for layer in dict.fromkeys(whole):
        for name in network.get_submodule(layer).state_dict():
            names[f"{layer}.{name}"] = f"{PREFIX}{layer}.{name}"
    any_one = next(iter(adapters.values()))
    rank = any_one.down.weight.shape[0]
    # Divided by the rank before, which may have rounded.
    alpha = round(any_one.scale * rank, 9)
    kinds = {type(module.base).__name__ for module in adapters.values()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": _targets(network, adapters),
        # Hugging Face's Conv1D stores its weight as [inputs, outputs].
        "fan_in_fan_out": "Conv1D" in kinds,
        "modules_to_save": list(dict.fromkeys(whole)) or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    return AdapterFiles(config, names)


def _targets(network: "nn.Module", adapters: Mapping[str, Any]) -> list[str] | str:
    """Return the ends of the adapted modules' names if no other module's name ends so,
    else a regular expression of the whole names.
    """
    ends = {name.rpartition(".")[2] for name in adapters}
    for name, _ in network.named_modules():
        # What is inside an adapted module is not in the network that PEFT adapts.
        inside = any(name.startswith(f"{adapted}.") for adapted in adapters)
        if name.rpartition(".")[2] in ends and name not in adapters and not inside:
            return "|".join(map(escape, adapters))
    return sorted(ends)
