"""Initial weights, and the global model that a run leaves for the next one: named
tensors in a file. No file is trusted to execute anything: no pickle is loaded.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile, ZipFile, is_zipfile

import numpy as np
import torch
from torch import Tensor, nn

from hpcfed.errors import UserError, did_you_mean, one_line
from hpcfed.models import peft_files
from hpcfed.models.layout import Layout
from hpcfed.models.peft_files import AdapterFiles
from hpcfed.options.first_weights import INIT
from hpcfed.results.folder import MODEL, RECORD
from hpcfed.results.publish import make_durably, publish, replacing
from hpcfed.results.safe import check_file, readable, reading
from hpcfed.results.sandbox import try_out

Tensors = Mapping[str, Tensor]
SUFFIXES = (".npz", ".safetensors")
KINDS = " or ".join(SUFFIXES)
MOST_KEPT = 2**28
"""Largest file of first weights, in bytes, that a run copies: a language model has
gigabytes, and each point of a study would have its own.
"""


@dataclass(frozen=True)
class BaseReference:
    """Where the frozen network is that a file of adapters does not hold."""

    folder: str
    drawn: str = ""
    """Options by which its weights are drawn, if the folder has none."""
    weights: str = ""
    """A checksum of those that the folder has."""


def save_model(
    folder: Path,
    layout: Layout,
    row: Tensor,
    frozen: Mapping[str, Tensor],
    base: BaseReference | None = None,
) -> None:
    """Write a global model into a run's folder, one array per tensor by its name: the
    tensors of the row, and frozen ones that are not part of rows. If those are in the
    folder of a `base`, the file says so instead.
    """
    tensors = tensors_of(layout, row)
    if base is None:
        tensors.update(frozen)
    arrays = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            # numpy does not know it.
            tensor = tensor.float()
        arrays[name] = tensor.numpy()
    with replacing(folder / MODEL) as file:
        _write_npz(file, arrays, base)


def tensors_of(layout: Layout, row: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a row by name, in the types that the network expects."""
    views = layout.views(row[None])
    return {e.name: e.taken(views[e.name][0]) for e in layout.entries}


def save_adapters(
    folder: Path, files: AdapterFiles, tensors: Mapping[str, Tensor]
) -> None:
    """Write adapters into a folder of their own, as PEFT reads them."""
    from safetensors.torch import save

    folder.mkdir(exist_ok=True, parents=True)
    named = {}
    for name, theirs in files.names.items():
        if name in tensors:
            named[theirs] = tensors[name].detach().cpu().contiguous()
    # The tensors first: a reader looks for the configuration.
    with replacing(folder / peft_files.WEIGHTS) as file:
        file.write(save(named, metadata={"format": "pt"}))
    with replacing(folder / peft_files.CONFIG) as file:
        file.write(json.dumps(files.config, indent=2).encode())


def frozen_tensors(network: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Return parameters that are not part of rows, such as those below adapters."""
    in_rows = {e.name for e in layout.entries}
    found = {}
    for name, parameter in network.named_parameters():
        if name not in in_rows:
            found[name] = parameter.detach()
    return found


def differing_constant(
    network: nn.Module, other: nn.Module, layout: Layout
) -> str | None:
    """Return the name of a tensor that is not part of rows, and differs between two
    networks: a frozen parameter, a mask, a table. None if all are equal.
    """
    in_rows = {e.name for e in layout.entries}
    theirs = _all_tensors(other)
    for name, tensor in _all_tensors(network).items():
        if name not in in_rows and not _are_equal(tensor, theirs[name]):
            return name
    return None


def _all_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers, and tensors that are plain attributes of modules."""
    found = dict([*network.named_parameters(), *network.named_buffers()])
    for prefix, module in network.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{name}".lstrip(".")] = value
    return found


def _are_equal(tensor: Tensor, other: Tensor) -> bool:
    # An engine may have moved its own to the device already.
    same = other.to(tensor.device, tensor.dtype)
    if torch.equal(tensor, same):
        return True
    if not tensor.is_floating_point() or tensor.shape != same.shape:
        return False
    # NaN is not equal to itself.
    return torch.allclose(tensor, same, rtol=0, atol=0, equal_nan=True)


def _write_npz(
    file: BinaryIO, arrays: Mapping[str, np.ndarray], base: BaseReference | None
) -> None:
    # Not by savez, which has an argument `file`: a tensor may have this name.
    with ZipFile(file, "w") as archive:
        if base is not None:
            # Readers of arrays do not see it.
            archive.comment = json.dumps(asdict(base)).encode()
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                # Not by ascontiguousarray, which turns a scalar into a vector.
                contiguous = np.asarray(array, order="C")
                np.lib.format.write_array(entry, contiguous, allow_pickle=False)


def base_of(path: Path) -> BaseReference | None:
    """Return where the network is whose adapters a run's model holds; None if the file
    holds all of the network, or does not say.
    """
    source = _source(path)
    if source.suffix != ".npz" or not is_zipfile(source):
        return None
    # A damaged file is told by whoever reads its arrays.
    damaged = (ValueError, TypeError, RecursionError, BadZipFile)
    with suppress(*damaged), ZipFile(source) as archive:
        return BaseReference(**json.loads(archive.comment))
    return None


def start_from(network: nn.Module, tensors: Tensors, path: Path) -> None:
    """Load weights from a path into a network; names and shapes must agree."""
    wanted = network.state_dict()
    # Tied weights have several names; a run's model has only the first.
    tied = {}
    first: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        tied[name] = first.setdefault(id(parameter), name)
    frozen = set()
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            frozen.add(name)
    for name, tensor in wanted.items():
        # Batch norm's batch counter has no column, and neither have frozen tensors: a
        # run's global model may lack both.
        one = tied.get(name, name)
        optional = one in frozen or not tensor.is_floating_point()
        optional = optional or one in tensors
        if name not in tensors and optional:
            continue
        if name not in tensors:
            hint = did_you_mean(name, tensors)
            raise UserError(f"--init {path}: there is no {name}{hint}")
        if tensors[name].shape != tensor.shape:
            raise UserError(
                f"--init {path}: {name} has shape {_shape(tensors[name])}, the network's "
                f"has {_shape(tensor)}"
            )
        _check_numbers(tensors[name], tensor, f"--init {path}: {name}")
    constants = dict(network.named_buffers())
    for name in tensors:
        if name in constants and name not in wanted:
            _check_constant(tensors[name], constants[name], f"--init {path}: {name}")
        elif name not in wanted:
            hint, flag = did_you_mean(name, wanted), "--model"
            if name.endswith(tuple(peft_files.FACTORS)):
                hint, flag = "", "--model and --lora-layers"
            raise UserError(
                f"--init {path}: the network has no {name}{hint}; give the same {flag}"
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in tensors:
                tensor.copy_(tensors[name])


def _check_constant(given: Tensor, ours: Tensor, what: str) -> None:
    """Refuse another value than the network's: a constant is never loaded."""
    if given.shape != ours.shape or not torch.equal(given.to(ours), ours):
        raise UserError(
            f"{what} has other values than the network, where nothing changes it; make "
            "the network with these values, or leave it out of the file"
        )


def _check_numbers(given: Tensor, wanted: Tensor, what: str) -> None:
    """Refuse numbers that the network's tensor cannot hold."""
    if given.is_complex():
        raise UserError(f"{what} has complex numbers; give real ones")
    if not bool(torch.isfinite(given.double()).all()):
        raise UserError(f"{what} has numbers that are not finite")
    if not bool(torch.isfinite(given.to(wanted.dtype)).all()):
        largest = f"{torch.finfo(wanted.dtype).max:.3g}"
        raise UserError(
            f"{what} has numbers beyond ±{largest}, the largest that rows can hold"
        )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "()"


def checksum(path: Path, kept: Path) -> dict[str, str]:
    """Return the sha256 of the weights by the path of the user's file, which may be
    gone: `kept` is the run's copy, or the same path.
    """
    source = _source(kept)
    is_file = path.suffix in SUFFIXES and not path.is_dir()
    name = path if is_file else path / source.name
    with open(source, "rb") as file:
        return {str(name): hashlib.file_digest(file, "sha256").hexdigest()}


def is_kept(path: Path) -> bool:
    """Tell whether a run keeps a copy of these weights."""
    return _source(path).stat().st_size <= MOST_KEPT


def keep(path: Path, run: Path) -> None:
    """Copy weights into a run's folder, where `kept_weights` finds them."""
    source, there = _source(path), run / INIT
    of_peft = source != path and source.name == peft_files.WEIGHTS
    make_durably(there)
    name = source.name if of_peft else f"model{source.suffix}"
    publish(source.read_bytes(), there / name)
    # Last: whoever finds it looks for the weights beside it.
    if of_peft:
        publish((path / peft_files.CONFIG).read_bytes(), there / peft_files.CONFIG)


def _source(path: Path) -> Path:
    """Return the file that holds the weights; `path` may be a run's folder."""
    if not path.is_dir():
        return path
    if (path / MODEL).is_file():
        return path / MODEL
    if peft_files.is_folder(path):
        return path / peft_files.WEIGHTS
    raise UserError(
        f"--init {path}: there is no {MODEL}. A run writes it when it completes, if its "
        "method has a global model"
    )


def model_of(path: Path) -> str | None:
    """Return which network the run had that left these weights, if known."""
    source = _source(path)
    record = source.with_name(RECORD)
    if source.name != MODEL or not record.is_file():
        return None
    with suppress(UserError):
        # A damaged file can crash HDF5: a child process opens it first.
        try_out([record])
        with readable(record, "a run"), reading(record) as file:
            return str(file.facts()["model"])
    return None


def read_weights(path: Path) -> Tensors:
    """Read named tensors from a file of any supported kind."""
    source = _source(path)
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if source.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise UserError(
            f"--init {path}: such a file is a pickle, which may run anything and is never "
            "loaded; save the tensors by safetensors.torch.save_file or numpy.savez"
        )
    reader = readers.get(source.suffix)
    if reader is None:
        raise UserError(f"--init {path}: must be a run's folder, or end in {KINDS}")
    try:
        check_file(source)
        found = reader(source)
        if source.name == peft_files.WEIGHTS and path.is_dir():
            found = peft_files.with_our_names(found, path)
        return found
    except UserError:
        raise
    # Libraries raise anything for a file that is damaged or of another kind.
    except Exception as error:
        raise UserError(f"--init {path} cannot be read: {one_line(error)}") from None


def _read_npz(path: Path) -> Tensors:
    # numpy takes any other file for a pickle, and would explain how to load it.
    if not is_zipfile(path):
        raise ValueError("it is not an .npz file, as numpy.savez makes it")
    found = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            try:
                array = np.asarray(arrays[name])
            except ValueError as error:
                if "pickle" not in str(error):
                    raise
                raise ValueError(f"{name} holds Python objects, not numbers") from None
            found[name] = torch.from_numpy(array)
    return found


def _read_safetensors(path: Path) -> Tensors:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UserError(
            f"--init {path}: pip install safetensors to read it, or give .npz"
        ) from None
    tensors: Tensors = load_file(path)
    return tensors
