"""Mutants that are no other program, as was judged by hand, with the reason."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutation.mutants import Mutant, mutant_of, points_of

FILE = Path(__file__).with_name("equivalent.toml")
Key = tuple[str, str, str, str]


@dataclass
class Judged:
    """Reasons by the text of the change, so that lines may move."""

    reasons: dict[Key, str]

    @classmethod
    def read(cls, file: Path = FILE) -> "Judged":
        reasons = {}
        for entry in tomllib.loads(file.read_text())["mutant"]:
            key = entry["module"], entry["in"], entry["old"], entry["new"]
            reasons[key] = entry["reason"]
        return cls(reasons)

    @property
    def modules(self) -> list[str]:
        """The modules that are spoken of."""
        return list(dict.fromkeys(key[0] for key in self.reasons))

    def reason(self, mutant: Mutant) -> str | None:
        """Return why a mutant is no other program; None: nobody has said so."""
        return self.reasons.get(mutant.key)

    def stale(self, texts: dict[str, bytes]) -> Iterator[str]:
        """Tell of entries that fit no mutant of these modules."""
        keys = {
            mutant_of(module, text, point).key
            for module, text in texts.items()
            for point in points_of(text)
        }
        for key in self.reasons:
            if key not in keys:
                module, function, old, _ = key
                yield f"equivalent.toml: {module} has no such line in {function}: {old}"
