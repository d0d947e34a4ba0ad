"""Data sets, links, FIFOs, devices and other entries of a folder that are not what they
should be.
"""

import contextlib
import io
import os
import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults import canaries
from benchmarks.hostile.commands import Commands, commands
from benchmarks.hostile.texts import newest_checkpoint
from hpcfed.results.checkpoints import MARKER


def plain_arrays() -> dict[str, Any]:
    """Return the arrays of a data set as it should be."""
    images = np.arange(24 * 64, dtype=np.uint8).reshape(24, 8, 8)
    labels = np.arange(24) % 3
    return {
        "train_images": images,
        "train_labels": labels,
        "test_images": images[:9],
        "test_labels": labels[:9],
    }


def sparse(case: Path, chance: random.Random) -> Commands:
    """Make a file claim to hold a terabyte, of nothing."""
    what, path = victim(case, chance, folders=False)
    # A hole: it takes no space on disk, but whoever reads it all never ends.
    path.touch()
    os.truncate(path, 2**40)
    return commands(case, what)


def fifo(case: Path, chance: random.Random) -> Commands:
    """Put a FIFO where a file or folder is."""
    what, path = victim(case, chance)
    canaries.remove(path)
    os.mkfifo(path)
    return commands(case, what)


def device(case: Path, chance: random.Random) -> Commands:
    """Put a device that never ends, holds nothing or takes nothing where a file is, or
    a link to it.
    """
    name, number = chance.choice((("zero", 5), ("null", 3), ("full", 7), ("random", 8)))
    # Results that are written to a device, as to /dev/null, must not take its place.
    if chance.random() < 0.2:
        with contextlib.suppress(PermissionError):  # root alone may make them
            os.mknod(case / "outside/null", 0o20666, os.makedev(1, 3))
            out = [
                "--unfinished",
                chance.choice(("--out", "--csv", "--json")),
                str(case / "outside/null"),
            ]
            return [
                ["report", str(case / "run"), "--out", str(case / "page.html"), *out]
            ]
    what, path = victim(case, chance)
    canaries.remove(path)
    try:
        if chance.random() < 0.5:
            raise PermissionError
        os.mknod(path, 0o20666, os.makedev(1, number))
    except PermissionError:
        path.symlink_to(f"/dev/{name}")
    return commands(case, what)


def link(case: Path, chance: random.Random) -> Commands:
    """Put a link where a file or folder is: to something or nothing outside, to the
    file itself that was moved away, or to itself.
    """
    what, path = victim(case, chance)
    outside = case / "outside"
    targets = [
        outside / "file", outside / "tree", outside / "empty/nothing", path, path.parent,
    ]  # fmt: skip
    # The user names these folders, so a link there may well be followed.
    named = path.parent == case and path.is_dir()
    if path.exists() and not named and chance.random() < 0.4:
        targets = [outside / "moved"]
        shutil.move(path, targets[0])
    canaries.remove(path)
    if named:
        targets.remove(outside / "tree")
    path.symlink_to(chance.choice(targets))
    return commands(case, what)


def victim(
    case: Path, chance: random.Random, *, folders: bool = True
) -> tuple[str, Path]:
    """Pick a file or folder that commands come across; return whose commands those are,
    and its path.
    """
    checkpoint = newest_checkpoint(case / "run")
    inside = ["run.h5", "error-0.txt", "server.h5", "params-0.h5", ".claim"]
    files = [("run", case / "run" / name) for name in inside]
    files += [
        ("run", checkpoint / name)
        for name in (MARKER, MARKER, "run.h5", "common.shared.npy", "worker-0.own.npy")
    ]
    files += [
        ("study", path)
        for path in (
            case / "study/study.h5",
            *sorted(case.glob("study/points/*/*.json")),
        )
    ]
    files += [("study", sorted(case.glob("study/points/*/*/run.h5"))[0])]
    files += [(name, case / name) for name in ("config.toml", "study.toml", "data.npz")]
    if folders:
        files += [
            ("run", path)
            for path in (
                case / "run",
                checkpoint.parent,
                checkpoint,
                case / "run/seed-3",
            )
        ]
        files += [("study", case / "study"), ("study", case / "study/points")]
    return chance.choice(files)


def npz(case: Path, chance: random.Random) -> Commands:
    """Change the members of a user's data set to what they should not be."""
    path, arrays = case / "data.npz", plain_arrays()
    name = chance.choice(list(arrays))
    shape, dtype = arrays[name].shape, arrays[name].dtype
    odd: list[Any] = [
        np.array([{"a": 1}] * 24, dtype=object), np.zeros(shape, [("a", "f4")]), np.zeros((0, 8, 8)), np.zeros(()),
        np.zeros((*shape, 1, 1)), np.asfortranarray(np.zeros(shape)), np.full(shape, 2**63, "u8"),
        *(np.zeros(shape, kind) for kind in ("c16", "M8[s]", "S3", ">f4", "f2", "?")),
        *(np.full(shape, value) for value in (np.nan, np.inf, -1, 2**62, 1e308)),
    ]  # fmt: skip
    members = {f"{key}.npy": npy(value) for key, value in arrays.items()}
    file = f"{name}.npy"
    header = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': "
    match chance.randrange(8):
        case 0 | 1:
            members[file] = npy(chance.choice(odd))
        case 2:
            # The header claims a shape that memory cannot hold, or that is none.
            huge = chance.choice(
                (
                    "(1000000000000,)",
                    "(-1,)",
                    "(2,) * 9",
                    "(" * 5000,
                    "(4611686018427387904, 8)",
                    "5",
                )
            )
            members[file] = with_header(header + huge + "}")
        case 3:
            texts = (
                "", "{}", "[]", "__import__('os')", "{'descr': " + "[" * 3000, "\x00",
                "{" + "'a': 1, " * 9000,
            )  # fmt: skip
            members[file] = with_header(chance.choice(texts))
        case 4:
            # Cut short, in its header or in its numbers.
            members[file] = members[file][: chance.randrange(len(members[file]))]
        case 5:
            # Missing.
            del members[file]
        case 6:
            strange = (
                "../../outside/file", "/outside/new", "a\x1b[2Jb.npy", "x" * 5000, "é.npy",
                "train_images", "",
            )  # fmt: skip
            # One more member, whose name would lead out of the archive or upset a
            # terminal.
            members |= {chance.choice(strange): b"more"}
        case _:  # a gigabyte of zeros, packed to one thousandth
            zeros = bytes(2**24)
            members[file] = (
                with_header(header + f"({64 * len(zeros) // dtype.itemsize},)}}")
                + zeros
            )
    zip_members(path, members, chance)
    return commands(case, "data.npz")


def npy(array: np.ndarray) -> bytes:
    """Return an array as a file of NumPy."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def with_header(header: str) -> bytes:
    """Return a file of NumPy that has this header, and no data."""
    content = header.encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(content)) + content


def zip_members(path: Path, members: dict[str, bytes], chance: random.Random) -> None:
    """Pack members into an archive, now and then with a method, a size or a flag that
    is not theirs.
    """
    packed = chance.choice(
        (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    )
    with zipfile.ZipFile(path, "w", packed) as archive:
        for name, content in members.items():
            with archive.open(name, "w") as file:
                file.write(content)
                if len(content) > 2**24:
                    for _ in range(63):
                        file.write(content[-(2**24) :])
    if chance.random() < 0.2:
        whole = bytearray(path.read_bytes())
        # The offsets are those of method, size and flags in the last entry of the
        # directory.
        start = whole.rfind(b"PK\x01\x02")
        whole[start + chance.choice((8, 10, 20, 24, 42))] ^= chance.choice((1, 0xFF))
        path.write_bytes(whole)
