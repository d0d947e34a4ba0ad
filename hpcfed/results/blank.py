"""Files in memory with all datasets of a run, and nothing in them yet.

HDF5 takes half a millisecond to create a dataset, and a run has fifty. Runs that share a
process mostly have the same ones, so the first run's blank file is kept, and copied.
"""

import os
from functools import lru_cache
from pathlib import Path

import h5py

from hpcfed.results.format import Declared, create

KEPT = 8
"""Different blank files: points of a study may differ in rounds and metrics."""


def blank_file(
    path: Path, declared: tuple[Declared, ...]
) -> tuple[h5py.File, dict[str, h5py.Dataset]]:
    """Return a file in memory that has these datasets, and the datasets by name."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_fapl_core(backing_store=False)
    # As h5py's File does: old readers understand it, and nothing has a time of its own.
    access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_LATEST)
    access.set_file_image(_image(declared))
    # HDF5 opens no name twice, though a process may have several active runs, and no
    # image under the name of a file that exists. Nothing is below a file.
    name = os.fsencode(path / "memory")
    opened = h5py.h5f.open(name, h5py.h5f.ACC_RDWR, fapl=access)
    return h5py.File(opened), {one.name: _dataset(opened, one) for one in declared}


def _dataset(file: h5py.h5f.FileID, declared: Declared) -> h5py.Dataset:
    # What File[name] does beside this takes three times as long.
    return h5py.Dataset(h5py.h5d.open(file, declared.name.encode()))


@lru_cache(KEPT)
def _image(declared: tuple[Declared, ...]) -> bytes:
    with h5py.File("blank", "w", driver="core", backing_store=False) as file:
        for one in declared:
            create(file, one)
        file.flush()
        image: bytes = file.id.get_file_image()
        return image
