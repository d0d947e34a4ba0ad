"""How many samples each client has, known before a run: dealt out as the run would."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hpcfed import methods
from hpcfed.data import files
from hpcfed.data.datasets import Dataset
from hpcfed.errors import UserError
from hpcfed.experiment.data import deal, load_alone
from hpcfed.options import RunConfig
from hpcfed.options.data import DataOptions
from hpcfed.options.partition import PartitionOptions

# A data set of texts may be in the tokens of the model.
_OF_DATA = (*DataOptions.declared(), "model")
_OF_PARTITION = (*_OF_DATA, *PartitionOptions.declared(), "clients")


@dataclass(frozen=True)
class _Shares:
    """What clients have that take part from the first round on."""

    train: np.ndarray
    """Training samples of each client."""
    stored: float
    """Samples by client, for training and testing; a shared one counts once."""


def has_own_data(config: RunConfig) -> bool:
    """Tell whether a client's samples are independent of the number of clients."""
    return config.dataset == "synthetic" or config.partition == "dominant"


def train_sizes(config: RunConfig) -> np.ndarray:
    """Return each client's number of training samples, as a run would assign them."""
    return _shares(config).train


def client_size(config: RunConfig) -> float:
    """Return the mean number of a client's training samples. Of a data set that is not
    here yet, it is an even share.
    """
    if _is_here(config):
        return float(train_sizes(config).mean())
    data = config.data()
    assert data.samples is not None  # only synthetic data has none, and is always here
    samples = data.samples[0] - (config.validation or 0)
    return samples / (data.owners or config.clients + config.new_clients)


def stored_samples(config: RunConfig) -> float:
    """Return the mean number of a client's samples, for training and testing."""
    if has_own_data(config):
        return float(config.train_per_client + config.test_per_client)
    return _shares(config).stored


def _is_here(config: RunConfig) -> bool:
    """Tell whether the data can be read without a download."""
    if not config.download:
        return True  # checked with the options
    try:
        files.require(
            config.dataset, root=config.root, download=False, reading=config.reading
        )
    except UserError:
        return False
    return True


def _shares(config: RunConfig) -> _Shares:
    validates = methods.load(config.method).VALIDATES
    takes = config.supplement or config.validation
    takes = takes or (validates and config.validation is None)
    # Known without dealing out samples, which may take seconds for many clients.
    even = config.dataset == "synthetic" and config.partition == "iid" and not takes
    own = config.partition == "dominant" and not config.supplement
    if even or own:
        sizes = np.full(config.clients, config.train_per_client)
        return _Shares(sizes, config.train_per_client + config.test_per_client)
    problem = _reduced(config, _OF_PARTITION).model_copy(
        update={
            "data_seed": config.seed_of_data,
            "new_clients": config.new_clients,
            "supplement_below": config.supplement_below or config.batch_size,
        }
    )
    return _dealt(problem, validates)


# Cached: points of a study often differ in other options alone.
@lru_cache(maxsize=256)
def _dealt(config: RunConfig, validates: bool) -> _Shares:
    # Options tell how much synthetic data there is, and which.
    synthetic = config.dataset == "synthetic"
    dataset = load_alone(config) if synthetic else _read(_of_files(config))
    found = deal(config, dataset, validates=validates).partition
    train, test = found.train[: config.clients], found.test[: config.clients]
    sizes = np.array([len(samples) for samples in train])
    sizes.flags.writeable = False
    stored = sum(len(np.unique(np.concatenate(lists))) for lists in (train, test))
    return _Shares(sizes, stored / config.clients)


def _of_files(config: RunConfig) -> RunConfig:
    """Return what decides on the contents of files: no seed does."""
    update = {"data_seed": 0, "partition": config.partition}
    return _reduced(config, _OF_DATA).model_copy(update=update)


@lru_cache(maxsize=1)
def _read(config: RunConfig) -> Dataset:
    return load_alone(config)


def _reduced(config: RunConfig, names: tuple[str, ...]) -> RunConfig:
    """Return these options alone: equal ones are equal keys, whatever else differs."""
    values = {name: getattr(config, name) for name in names}
    # The folder that a relative path means may change.
    values["data_root"] = config.root.resolve()
    return RunConfig.model_construct(**values)
