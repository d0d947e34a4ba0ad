"""Options of the data set."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

from hpcfed.data import DatasetInfo, Reading, TextPlan, files
from hpcfed.data.brought import is_brought, is_file_name, is_language
from hpcfed.data.json_lines import is_lines
from hpcfed.options.declare import Choice, Need, OptionGroup, option
from hpcfed.options.run import Seed
from hpcfed.options.tomlfile import Table

# Five digits a side keep the number of pixels within 64 bits.
SHAPE = r"^[1-9]\d{0,4}x[1-9]\d{0,4}x[1-9]\d{0,4}$"
"""How --synthetic-shape is written."""

_SYNTHETIC = Need("--dataset synthetic", lambda run: run.dataset == "synthetic")
_TEXT = Need("--dataset text:DIR", lambda run: run.dataset.startswith("text:"))
_LINES = Need("--dataset PATH.jsonl", lambda run: is_lines(run.dataset))
LANGUAGE = Need(
    "--dataset text:DIR or PATH.jsonl", lambda run: is_language(run.dataset)
)
_TOKENISED = Need(
    "--dataset PATH.jsonl, or text:DIR with --text-tokens tokeniser",
    lambda run: run.needs_tokeniser,
)
USUAL_LENGTH = 512
"""Tokens of a prompt with its response, if not given."""


def _takes_keywords(dataset: str) -> bool:
    """Tell whether a function reads the data set, or it has columns to choose from."""
    own = is_brought(dataset) and not dataset.startswith("text:")
    return own and not is_file_name(dataset)


class DataOptions(OptionGroup):
    title: ClassVar[str] = "data set"
    poses_problem: ClassVar[bool] = True

    # Not a Literal: file:PATH may name any file.
    dataset: str = option(
        "digits",
        "a data set that `hpcfed list` names, or your own: file:PATH.npz, PATH.csv, "
        "PATH.jsonl, text:DIR, hf-data:DIR, or a function as FILE.py:NAME or "
        "package.module:NAME",
        told="always",
        names_code="data set",
        also="data data_set dataset_name",
    )
    dataset_options: Table = option(
        None,
        "keywords for your own function, columns of a table or hf-data, or fields of "
        "JSON lines, as JSON: '{\"users\": 40}'",
        also="dataset_kwargs dataset_args data_options data_args data_kwargs",
        needs=Need("--dataset FILE.py:NAME", lambda run: _takes_keywords(run.dataset)),
    )
    data_root: Path | None = option(
        None,
        "folder of the data sets (default: $HPCFED_DATA, else ./data)",
        changes="nothing",
        also="data_dir data_path datadir dataset_dir data_folder root "
        "dataset_path data_cache_dir root_dir",
    )
    download: bool = option(
        False,
        "let torchvision download what is missing",
        changes="nothing",
        from_record=False,
    )
    synthetic_shape: str = option(
        "3x32x32",
        "synthetic: channels x height x width",
        pattern=SHAPE,
        needs=_SYNTHETIC,
    )
    synthetic_classes: int = option(
        10, "synthetic: number of classes", ge=2, needs=_SYNTHETIC
    )
    text_clients: str = option(
        "file",
        "text: one client per file, or one per name that the first group of this "
        "regular expression finds in the files' names, such as '_(.+)_'",
        needs=_TEXT,
    )
    text_tokens: Literal["chars", "bytes", "tokeniser"] = option(
        "chars",
        "text: what is predicted; chars: those of the training text; tokeniser: the "
        "tokens of --tokeniser",
        also="tokens tokenization",
        needs=_TEXT,
    )
    text_length: int = option(
        128,
        "text and JSON lines: the most tokens of a sample; 512 for JSON lines if not "
        "given",
        ge=1,
        le=2**20,
        also="block_size context_length context seq_len seq_length "
        "sequence_length window max_length",
        needs=LANGUAGE,
    )
    text_test: float = option(
        0.1,
        "text: share of each file, at its end, for testing",
        gt=0,
        lt=1,
        needs=_TEXT,
    )
    text_loss: Literal["responses", "all"] = option(
        "responses",
        "JSON lines: which tokens are learnt; all: those of prompts, too",
        also="completion_only_loss train_on_inputs mask_prompt assistant_only_loss",
        needs=_LINES,
    )
    text_pack: bool = option(
        False,
        "JSON lines: put several training samples of a client into one, as far as "
        "--text-length allows; models hf:DIR keep them apart, in others each sees those "
        "before it",
        also="packing pack sample_packing",
        needs=_LINES,
    )
    tokeniser: Path | None = option(
        None,
        "folder of the tokeniser, as transformers saves it (default: that of --model "
        "hf:DIR)",
        also="tokenizer tokenizer_name tokenizer_path",
        needs=_TOKENISED,
    )
    # 0 is a seed like any other, not "unset".
    data_seed: Seed | None = option(
        None,
        "seed of the partition and of synthetic data (default: --seed)",
        zero=True,
        stackable=True,
        also="partition_seed split_seed dataset_seed",
    )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of synthetic images: channels, height, width."""
        channels, height, width = self.synthetic_shape.split("x")
        return int(channels), int(height), int(width)

    @property
    def reading(self) -> Reading:
        """How to read the user's own data."""
        plan = TextPlan(
            clients=self.text_clients,
            tokens=self.text_tokens,
            length=self.text_length,
            test=self.text_test,
            tokeniser=self.tokeniser_folder(),
            loss=self.text_loss,
            pack=self.text_pack,
            apart=self.packs_apart(),
        )
        return Reading(self.dataset_options or "{}", plan)

    @property
    def needs_tokeniser(self) -> bool:
        """Whether a tokeniser makes the tokens."""
        return is_lines(self.dataset) or self.text_tokens == "tokeniser"

    def tokeniser_folder(self) -> Path | None:
        """Return the folder of the tokeniser, if one is needed and named."""
        return self.tokeniser

    def packs_apart(self) -> bool:
        """Tell whether samples that are packed into a row do not see each other."""
        return False

    @property
    def root(self) -> Path:
        """The folder of the data sets."""
        # An empty variable counts as unset.
        return self.data_root or Path(os.environ.get("HPCFED_DATA") or "data")

    def data(self) -> DatasetInfo:
        """Return shape and classes without loading the data; refuse missing data."""
        return files.info(
            self.dataset,
            root=self.root,
            synthetic_shape=self.shape,
            synthetic_classes=self.synthetic_classes,
            reading=self.reading,
        )


def text_choices(config: DataOptions) -> Iterable[Choice]:
    """Let a prompt with its response be longer than a piece of a text."""
    if is_lines(config.dataset):
        reason = "usual for prompts and responses; --text-length sets another"
        yield Choice("text_length", USUAL_LENGTH, reason)


def check_data(config: DataOptions) -> None:
    """Refuse an unknown data set, and a missing one that may not be downloaded."""
    files.require(
        config.dataset,
        root=config.root,
        download=config.download,
        reading=config.reading,
    )
