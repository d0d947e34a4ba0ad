"""Rows of the table of adapters: bases with random weights, and what clients do."""

from dataclasses import dataclass, replace
from typing import Any

Config = dict[str, Any]


def _gpt2(width: int, depth: int, heads: int) -> Config:
    sizes = {"n_embd": width, "n_layer": depth, "n_head": heads, "vocab_size": 50257}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {"model_type": "gpt2", "n_positions": 1024} | sizes | dropout


def _llama(width: int, inner: int, depth: int, heads: int) -> Config:
    sizes = {"hidden_size": width, "intermediate_size": inner, "vocab_size": 32000}
    more = {"num_hidden_layers": depth, "num_attention_heads": heads}
    more |= {"max_position_embeddings": 2048, "tie_word_embeddings": False}
    return {"model_type": "llama", **sizes, **more}


@dataclass(frozen=True)
class Base:
    """A frozen network, and where its adapters are."""

    config: Config
    rank: int
    layers: str


IN_BLOCKS, Q_AND_V = "transformer.h.*", "*.q_proj,*.v_proj"
BASES = {
    "124 M": Base(_gpt2(768, 12, 12), 8, IN_BLOCKS),
    "774 M": Base(_gpt2(1280, 36, 20), 8, IN_BLOCKS),
    "1.04 B": Base(_llama(2048, 5504, 18, 16), 32, Q_AND_V),
    "7 B": Base(_llama(4096, 11008, 32, 32), 32, Q_AND_V),
}
TINY = {
    "gpt2": _gpt2(32, 2, 2) | {"vocab_size": 64},
    "llama": _llama(32, 48, 2, 2) | {"vocab_size": 64},
}
"""Small ones of the same kinds, for tests."""


@dataclass(frozen=True)
class Row:
    base: str
    clients: int
    batch: int
    length: int
    steps: int = 4
    """Local steps of a round."""
    cohort: int = 0
    """Clients of a round; 0: all."""
    at_once: int = 0
    """One batch: samples that go through the network together; 0: all."""
    whole: int = 0
    """Rounds to tell the time of; 0: none."""

    @property
    def active(self) -> int:
        return self.cohort or self.clients

    @property
    def tokens(self) -> int:
        """Tokens of a step of all clients that take part."""
        return self.active * self.batch * self.length


ROWS = {
    "gpt2-124m": Row("124 M", 20, 4, 256),
    "many-124m": Row("124 M", 1000, 1, 256, steps=2, at_once=100),
    "gpt2-774m": Row("774 M", 20, 4, 256),
    "llama-1b": Row("1.04 B", 10, 4, 512),
    "llama-1b-batch1": Row("1.04 B", 10, 1, 512),
    "many-1b": Row("1.04 B", 100, 1, 512, steps=2, at_once=50),
    "flower": Row("7 B", 20, 16, 512, steps=10, cohort=2, at_once=16, whole=200),
}


def tiny(row: Row) -> Row:
    """Return a row that a CPU trains within a second."""
    clients, cohort = min(row.clients, 6), min(row.cohort, 2)
    few = replace(row, clients=clients, cohort=cohort, batch=min(row.batch, 2))
    return replace(few, length=8, steps=2, at_once=2 if row.at_once else 0)


def tiny_base(base: Base) -> Base:
    """Return a base of the same kind that a CPU trains within a second."""
    return replace(base, config=TINY[base.config["model_type"]], rank=2)


@dataclass(frozen=True)
class Cell:
    """What one column gave in one row."""

    row: str
    column: str
    speed: float | None = None
    """Tokens per second; None where it failed."""
    gib: float | None = None
    """Peak of the device's memory; of the process, on a CPU (hpcfed only)."""
    note: str = ""
