"""server.h5: a trained model in a file. It holds only numbers and JSON, so that reading
a file from an unknown source is safe.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import UserError, one_line
from hpcfed.options import facts_of
from hpcfed.results.publish import replacing_hdf5
from hpcfed.results.safe import Reader, reading
from hpcfed.server.options import ServerOptions
from hpcfed.server.scaling import LatentScaling, RowScaling

FORMAT, SCHEMA = "hpcfed server", 2
DOUBLE = ("coordinates", "axes")
"""Groups of float64 numbers. The bank keeps its type, and all others are float32."""
MOST_BYTES = 2**40
"""The largest saved server that we read, in bytes."""


@dataclass(frozen=True)
class SavedServer:
    """What a trained model consists of."""

    groups: dict[str, dict[str, Tensor]]
    """Tensors by group and name: those of each network, scalings, and what else a model
    needs.
    """
    learnings: int
    """How often the model has learnt, so that the next learning draws other numbers."""
    start: Tensor | None = None
    """With --bank-of updates: the generated columns of the last global model. A
    generated update without its own start is added to these.
    """


def write(
    path: Path, saved: SavedServer, widths: Sequence[int], options: ServerOptions
) -> None:
    """Write the whole file, or leave the old one in place."""
    size = 0
    for tensors in saved.groups.values():
        for tensor in tensors.values():
            size += tensor.nbytes
    with replacing_hdf5(path, size) as there, h5py.File(there, "w") as file:
        _write(file, saved, widths, options)


def _write(
    file: h5py.File, saved: SavedServer, widths: Sequence[int], options: ServerOptions
) -> None:
    file.attrs.update(format=FORMAT, schema=SCHEMA, widths=widths, runs=saved.learnings)
    file["options"] = json.dumps(options.model_dump(mode="json"), indent=1)
    for group, tensors in saved.groups.items():
        for name, tensor in tensors.items():
            put(file, f"{group}/{name}", _kept(tensor))
    if saved.start is not None:
        put(file, "start/columns", _kept(saved.start))


def _kept(tensor: Tensor) -> Tensor:
    """Return a tensor in a type that the file has."""
    # Networks may be in bfloat16, which numpy does not know.
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def put(file: h5py.File, name: str, tensor: Tensor) -> None:
    """Write a tensor, with checksums if HDF5 supports them."""
    array = tensor.cpu().numpy()
    # HDF5 has no chunks, and so no checksums, for scalars and empty arrays.
    packed = {}
    if array.size and array.ndim:
        packed = {"chunks": True, "fletcher32": True}
    file.create_dataset(name, data=array, **packed)


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn any error from a damaged file into one line for the user."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # A damaged or hostile file makes libhdf5, h5py and torch raise anything.
        raise UserError(
            f"--server-load {path} is not a saved server: {one_line(error)}"
        ) from None


def read(
    path: Path,
    widths: Sequence[int],
    options: ServerOptions,
    device: torch.device,
    groups: Sequence[str],
) -> SavedServer:
    """Return these groups of a saved model; raise UserError if it does not fit the
    run's columns and options. A group that the file does not have is left out.
    """
    with reading(path, most=MOST_BYTES) as file:
        facts = file.facts()
        kind = facts.get("format"), facts.get("schema")
        if kind != (FORMAT, SCHEMA):
            raise UserError(
                f"--server-load {path} is not a server that this version has saved"
            )
        if list(facts["widths"]) != list(widths):
            raise UserError(
                f"--server-load {path} was made for other columns than this run "
                "generates"
            )
        written = json.loads(file.text("options"))
        _check_size(written, path, options)
        _check_kind(written, path, options)
        found = {}
        for group in groups:
            if group in file:
                found[group] = _tensors(file, group, device)
        start = _start(file, sum(widths), device)
        return SavedServer(found, int(facts["runs"]), start)


def _start(file: Reader, width: int, device: torch.device) -> Tensor | None:
    if "start" not in file:
        return None
    columns = _tensors(file, "start", device)["columns"]
    if columns.shape != (width,):
        raise ValueError("its start has other columns")
    return columns


def _check_kind(written: dict[str, Any], path: Path, options: ServerOptions) -> None:
    """Refuse a model of updates for a run of uploads, and vice versa."""
    # Files of the first versions do not have this option.
    learnt = written.get("bank_of", "uploads")
    if learnt not in ("updates", "uploads"):
        raise ValueError("it has learnt neither updates nor uploads")
    if learnt != options.bank_of:
        raise UserError(
            f"--server-load {path} has learnt {learnt}; use --bank-of {learnt}"
        )


def _check_size(written: dict[str, Any], path: Path, options: ServerOptions) -> None:
    """Refuse networks of another size, and say which options would fit."""
    # Other options, such as the learning rate, may differ: this run uses its own.
    shaping = {}
    for name, field in ServerOptions.model_fields.items():
        # Files of older versions have p-diff, and do not say so.
        if facts_of(field).shapes_server and name in written:
            shaping[name] = written[name]
    sizes = _shaping_flags(ServerOptions(**shaping))
    if sizes != _shaping_flags(options):
        words = [f"{flag} {value}" for flag, value in sizes.items()]
        flags = " ".join(words)
        raise UserError(f"--server-load {path} has another size; use {flags}")


def _shaping_flags(options: ServerOptions) -> dict[str, str | int]:
    size = options.size
    flags: dict[str, str | int] = {
        "--server-model": options.server_model,
        "--server-width": size.width,
        "--server-depth": size.depth,
        "--diffusion-steps": options.diffusion_steps,
    }
    if options.server_model != "span":
        flags["--server-latent"] = size.latent
        flags["--denoiser-depth"] = size.denoiser_depth or size.depth
    return flags


def _tensors(file: Reader, group: str, device: torch.device) -> dict[str, Tensor]:
    """Return the group's arrays by name, in its type; refuse non-finite ones."""
    reader = file.within(group)
    tensors = {}
    for name in reader.names():
        # A float64 that float32 cannot hold becomes infinite, and is refused below.
        shape = reader.shape(name)
        array = reader.numbers(name, shape)
        if group in DOUBLE:
            array = array.astype(np.float64)
        elif group != "bank":
            with np.errstate(over="ignore"):
                array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"{group}/{name} holds what no training makes")
        tensors[name] = torch.as_tensor(array, device=device)
    return tensors


def check_scaling(scaling: RowScaling | LatentScaling, width: int) -> None:
    """Refuse a scaling of another number of columns."""
    mean, scale = scaling.mean.shape, scaling.scale.shape
    # Rows have a scale for every column, latents a single one.
    scales = ((), (1,), (width,))
    if mean != (width,) or scale not in scales:
        raise ValueError("its means and scales are of other columns")
