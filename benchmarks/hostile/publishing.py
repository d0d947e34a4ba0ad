"""Check that a file whose writer is killed while it publishes holds the old version or
the new one, whole.

A process publishes version after version and says when each is on disk. It is killed
(SIGKILL) at a random moment, and the next one goes on. Meanwhile and afterwards the
file is read: every version carries its own checksum.

example:
  python -m benchmarks.hostile.publishing --kills 200
"""

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import launching
from benchmarks.arguments import parser_of
from hpcfed.results.publish import publish

LONGEST = 0.08
"""Seconds from the first version of a process to its end, at most."""
SIZES = (100, 5_000, 300_000, 4_000_000)


def made(version: int) -> bytes:
    """Return a version with its checksum before it; every byte of a version differs
    from its neighbours'.
    """
    body = version.to_bytes(8, "little") * (
        SIZES[version % len(SIZES)] // 8 + version % 7
    )
    return hashlib.sha256(body).digest() + body


def version_of(content: bytes) -> int | None:
    """Return the number of a version; None of a torn one."""
    whole = len(content) > 32 and hashlib.sha256(content[32:]).digest() == content[:32]
    return int.from_bytes(content[32:40], "little") if whole else None


def publish_for_ever(path: Path, version: int) -> None:
    """Publish version after version, and say when each is on disk."""
    while True:
        publish(made(version), path)
        os.write(1, version.to_bytes(8, "little"))
        version += 1


def kill_once(
    path: Path, version: int, random: random.Random
) -> tuple[list[int | None], int, int]:
    """Kill a process that publishes from this version on. Return what was read
    meanwhile, the last version that it reported, and what is there afterwards.
    """
    words = [
        sys.executable,
        # Without site-packages Python starts faster.
        "-S",
        "-m",
        "benchmarks.hostile.publishing",
        "--publisher",
        str(path),
        "--version",
        str(version),
    ]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, env=launching.environment()
    )
    assert process.stdout is not None
    told, seen = process.stdout.read(8), []
    end = time.perf_counter() + random.uniform(0, LONGEST)
    while time.perf_counter() < end:
        seen.append(version_of(path.read_bytes()))
    process.kill()
    told += process.stdout.read()
    process.wait()
    after = version_of(path.read_bytes())
    # The kill may have cut the last number short.
    last = int.from_bytes(told[-8 - len(told) % 8 :][:8], "little")
    return seen, last, -1 if after is None else after


def campaign(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill a number of processes, and count what was read."""
    figures = dict.fromkeys(
        (
            "kills",
            "versions",
            "reads",
            "torn",
            "older than told",
            "unfinished",
            "left behind",
        ),
        0,
    )
    path, chance, version = folder / "file", random.Random(seed), 0
    for _ in range(kills):
        seen, last, after = kill_once(path, version, chance)
        figures["kills"] += 1
        figures["versions"] += last + 1 - version
        figures["reads"] += len(seen) + 1
        figures["torn"] += seen.count(None) + (after < 0)
        figures["older than told"] += 0 <= after < last
        figures["unfinished"] += len(os.listdir(folder)) - 1
        version = last + 2  # the last may stand there without having been told
    publish(made(version), path)
    figures["left behind"] = len(os.listdir(folder)) - 1
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: a temporary folder)"
    )
    parser.add_argument("--publisher", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--version", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publisher is not None:
        publish_for_ever(options.publisher, options.version)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = campaign(Path(folder), options.kills, options.seed)
    print("  ".join(figures))
    print("  ".join(f"{figures[name]:{len(name)}}" for name in figures))
    if figures["torn"] or figures["older than told"] or figures["left behind"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
