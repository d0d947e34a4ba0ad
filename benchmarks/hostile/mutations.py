"""Changes to HDF5 files, byte by byte and through h5py."""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def flip(content: bytearray, random: random.Random) -> None:
    """Flip some bits."""
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        content[position(content, random)] ^= 1 << random.randrange(8)


def overwrite(content: bytearray, random: random.Random) -> None:
    """Overwrite some bytes with numbers that mean much."""
    for _ in range(random.choice((1, 2, 4))):
        at = position(content, random)
        values = [b"\xff" * 8, b"\0" * 8, b"\x7f" * 4]
        values += [random.randbytes(8), bytes([random.randrange(256)])]
        value = random.choice(values)
        content[at : at + len(value)] = value


def truncate(content: bytearray, random: random.Random) -> None:
    """Cut the end off."""
    del content[random.randrange(len(content)) :]


def swap(content: bytearray, random: random.Random) -> None:
    """Swap two blocks."""
    size = random.choice((8, 64, 512, 4096))
    last = max(1, len(content) - size)
    one, other = random.randrange(last) // 8 * 8, random.randrange(last) // 8 * 8
    first, second = slice(one, one + size), slice(other, other + size)
    content[first], content[second] = content[second], content[first]


def zero(content: bytearray, random: random.Random) -> None:
    """Overwrite a block with zeros."""
    size, at = random.choice((8, 64, 512, 4096)), position(content, random)
    content[at : at + size] = bytes(len(content[at : at + size]))


def position(content: bytearray, random: random.Random) -> int:
    """Return a position in the file; half of them are where a file says what it holds."""
    # HDF5 puts most of its structure at the beginning.
    headers = min(len(content), 8192)
    return random.randrange(len(content) if random.random() < 0.5 else headers)


def items(file: h5py.File, kind: type = object) -> list[str]:
    """Return the names of all groups and datasets, or of one kind."""
    names: list[str] = []
    file.visititems(
        lambda name, item: names.append(name) if isinstance(item, kind) else None
    )
    return names


def delete(file: h5py.File, random: random.Random) -> None:
    """Delete a group or dataset."""
    del file[random.choice(items(file))]


def rename(file: h5py.File, random: random.Random) -> None:
    """Give a name a strange ending, or give one the place of another."""
    # Either a name that nothing looks for, or one that means something else.
    one, other = random.sample(items(file), 2)
    if random.random() < 0.5:
        file.move(one, one + random.choice(("x", " ", "\n", "é", "<script>")))
    elif not other.startswith(one) and not one.startswith(other):
        del file[other]
        file.move(one, other)


def retype(file: h5py.File, random: random.Random) -> None:
    """Replace a dataset by one of another type, by an empty one or by a group."""
    name = random.choice(items(file, h5py.Dataset))
    shape = file[name].shape
    del file[name]
    kinds: list[Any] = [
        "i1", "u8", ">f4", "f2", "c16", "S5", "?", "O", [("a", "f8"), ("b", "i4")], h5py.ref_dtype,
    ]  # fmt: skip
    kinds += [
        h5py.vlen_dtype("f8"),
        h5py.enum_dtype({"A": 1, "B": 2}),
        h5py.opaque_dtype(np.dtype("M8[s]")),
        "g",
    ]
    kind = random.choice(kinds)
    if random.random() < 0.2:
        file[name] = h5py.Empty("f8")
    elif random.random() < 0.2:
        file.create_group(name)
    else:
        file.create_dataset(name, shape, h5py.string_dtype() if kind == "O" else kind)


def reshape(file: h5py.File, random: random.Random) -> None:
    """Replace a dataset by one of another shape."""
    name = random.choice(items(file, h5py.Dataset))
    data = file[name]
    dtype, shape = data.dtype, list(data.shape)
    del file[name]
    change = random.randrange(5)
    if change == 0 or not shape:
        shape.append(random.choice((0, 1, 3)))
    elif change == 1:
        shape.pop()
    else:
        shape[random.randrange(len(shape))] = random.choice((0, 1, 2, 7, 2**20))
    file.create_dataset(
        name,
        shape,
        dtype,
        chunks=tuple(min(n, 8) for n in shape) if all(shape) and shape else None,
    )


def huge(file: h5py.File, random: random.Random) -> None:
    """Declare shapes that the file does not hold; now and then the run claims too many
    rounds.
    """
    name = random.choice(items(file, h5py.Dataset))
    dtype, dimensions = file[name].dtype, max(1, len(file[name].shape))
    del file[name]
    # Chunks are written on demand, so the file stays small.
    length = random.choice((2**31, 2**40, 2**50))
    file.create_dataset(
        name,
        (length, *[4] * (dimensions - 1)),
        dtype,
        chunks=(1024, *[1] * (dimensions - 1)),
    )
    for attribute in ("rounds_done", "clients", "ranks", "columns"):
        if attribute in file.attrs and random.random() < 0.3:
            file.attrs[attribute] = length
    if "config" in file and random.random() < 0.5 and file["config"].shape == ():
        config = json.loads(file["config"].asstr()[()])
        replace_text(file, "config", json.dumps(config | {"rounds": length}))


def attribute(file: h5py.File, random: random.Random) -> None:
    """Remove an attribute, change it to what it should not be, or add many."""
    attributes = random.choice([file, *(file[name] for name in items(file))]).attrs
    name = random.choice([*attributes, "more"])
    match random.randrange(4):
        case 0:
            attributes.pop(name, None)
        case 1:
            attributes[name] = random.choice(
                ("x" * 60000, "\ud800".encode("utf-8", "surrogatepass"), b"\xff\xfe")
            )
        case 2:
            attributes[name] = random.choice(
                (
                    -1,
                    2**62,
                    1.5,
                    float("nan"),
                    True,
                    [1, 2],
                    np.zeros(5000),
                    "",
                    "<b>'\"",
                )
            )
        case _:
            # Never twice the same name: to replace one of so many takes HDF5 up to
            # half a second, and to replace all of them minutes.
            for number in range(random.choice((20, 1200))):
                attributes[f"more {random.getrandbits(64)}"] = number


def numbers(file: h5py.File, random: random.Random) -> None:
    """Write numbers that cannot be."""
    names = [
        name
        for name in items(file, h5py.Dataset)
        if file[name].dtype.kind in "fiu" and file[name].size
    ]
    data = file[random.choice(names)]
    values = data[()].reshape(-1) if data.shape else np.array([data[()]])
    bad: list[float] = [0, -1, 2**30]
    if data.dtype.kind == "f":
        bad = [0, -1, 1e-300, 1e300, float("inf"), float("nan"), 2**53]
    many = random.choice((1, len(values)))
    for _ in range(many):
        at, value = random.randrange(len(values)), np.array(random.choice(bad))
        with np.errstate(over="ignore"):
            values[at] = value.astype(values.dtype)
    data[...] = values.reshape(data.shape)


def words(file: h5py.File, random: random.Random) -> None:
    """Replace text and JSON by something else."""
    names = [
        name
        for name in items(file, h5py.Dataset)
        if h5py.check_string_dtype(file[name].dtype)
    ]
    name = random.choice(names)
    strange = [
        "", "{}", "[]", "null", "[" * 50000, '{"a": ' * 5000, "\x1b[2J\n",
        "<script>alert(1)</script>", "x" * 10**6,
    ]  # fmt: skip
    if file[name].shape:
        values = file[name].asstr()[()]
        values[random.randrange(len(values))] = random.choice(strange)
        replace_text(file, name, values)
    elif name.endswith(("config", "environment", "options")) and random.random() < 0.8:
        content = json.loads(file[name].asstr()[()])
        key = random.choice(list(content))
        wrong: list[Any] = [
            None, -1, 10**30, 1e308, "../../x", "/etc", "\ud800", [], {}, [[1]], True, "<i>\"'",
            "1", 0.5,
        ]  # fmt: skip
        content[key] = random.choice(wrong)
        if random.random() < 0.3:
            del content[key]
        replace_text(file, name, json.dumps(content))
    else:
        replace_text(file, name, random.choice(strange))


def replace_text(file: h5py.File, name: str, value: Any) -> None:
    """Replace a dataset by text."""
    del file[name]
    file[name] = (
        value if isinstance(value, str) else np.array(value, dtype=h5py.string_dtype())
    )


def link(file: h5py.File, random: random.Random) -> None:
    """Put links to other files, to nowhere and in circles, external storage, and
    filters.
    """
    name = random.choice(items(file))
    secret = str(Path(file.filename).with_name("secret.h5"))
    shape = getattr(file[name], "shape", None) or (4,)
    place = name if random.random() < 0.7 else name + " more"
    if place == name:
        del file[name]
    match random.randrange(6):
        case 0:
            file[place] = h5py.ExternalLink(secret, "/" + name)
        case 1:
            file[place] = h5py.SoftLink(
                random.choice(("/nowhere", "/" + place, "/", "../x"))
            )
        case 2:
            file[place] = file["/"]
        case 3:
            layout = h5py.VirtualLayout(shape, "f8")
            layout[...] = h5py.VirtualSource(secret, "data", shape)
            file.create_virtual_dataset(place, layout)
        case 4:
            file.create_dataset(
                place, shape, "f8", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
            )
        case _:
            file.create_dataset(
                place,
                (2**16,),
                "f8",
                data=np.zeros(2**16),
                compression="gzip",
                compression_opts=9,
            )


BYTES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "bits flipped": flip, "bytes overwritten": overwrite, "truncated": truncate, "blocks swapped": swap,
    "blocks zeroed": zero,
}  # fmt: skip
OBJECTS: dict[str, Callable[[h5py.File, random.Random], None]] = {
    "deleted": delete, "renamed": rename, "retyped": retype, "reshaped": reshape, "huge shapes": huge,
    "attributes": attribute, "numbers": numbers, "texts": words, "links and filters": link,
}  # fmt: skip
EXPECTED = (LookupError, ValueError, OSError, TypeError, RuntimeError)
"""What h5py may raise over a file that is changed already."""
KINDS = (*BYTES, *OBJECTS)
"""Changes to HDF5 files."""


def mutate(original: Path, path: Path, kind: str, random: random.Random) -> None:
    """Write a changed copy of the original to another path."""
    path.unlink(missing_ok=True)
    if kind in BYTES:
        content = bytearray(original.read_bytes())
        BYTES[kind](content, random)
        path.write_bytes(content)
        return
    shutil.copy(original, path)
    with h5py.File(path, "r+") as file:
        for number in range(random.choice((1, 1, 1, 2, 5))):
            # A second change may fail over what the first has done; the first may not.
            with suppress(*(EXPECTED if number else ())):
                OBJECTS[kind](file, random)
