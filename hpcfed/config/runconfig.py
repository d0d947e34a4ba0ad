"""All options of every run, in one flat class made of the groups."""

from pathlib import Path

from pydantic import field_validator

from hpcfed import plugins
from hpcfed.config.aggregation import AggregationOptions
from hpcfed.config.compression import CompressionOptions
from hpcfed.config.data import DataOptions
from hpcfed.config.declare import OptionGroup
from hpcfed.config.devices import DeviceOptions
from hpcfed.config.machine import MachineOptions
from hpcfed.config.malicious import MaliciousOptions
from hpcfed.config.newcomers import NewcomerOptions
from hpcfed.config.optimiser import OptimiserOptions
from hpcfed.config.partition import PartitionOptions
from hpcfed.config.privacy import PrivacyOptions
from hpcfed.config.recording import RecordingOptions
from hpcfed.config.run import RunOptions
from hpcfed.config.training import TrainingOptions

GROUPS: tuple[type[OptionGroup], ...] = (
    RunOptions,
    NewcomerOptions,
    RecordingOptions,
    DataOptions,
    PartitionOptions,
    TrainingOptions,
    OptimiserOptions,
    AggregationOptions,
    MaliciousOptions,
    PrivacyOptions,
    CompressionOptions,
    DeviceOptions,
    MachineOptions,
)
"""The groups in the order of `hpcfed run --help`."""


# Pydantic lists the fields of the last base first, and records follow its order: data,
# partition, training and optimiser, then aggregation, attacks, compression, devices,
# privacy and the machine. The groups of the run and of newcomers come before all of
# them, because others inherit them.
class RunConfig(
    MachineOptions,
    PrivacyOptions,
    DeviceOptions,
    CompressionOptions,
    MaliciousOptions,
    AggregationOptions,
    OptimiserOptions,
):
    """The options that every run has, whatever its method."""

    @field_validator("method", "model", "dataset")
    @classmethod
    def whole_path(cls, value: str) -> str:
        """Make the path of a user's file absolute: the record must be understood from
        any folder.
        """
        return plugins.absolute(value)

    @field_validator("init")
    @classmethod
    def whole_folder(cls, value: Path | None) -> Path | None:
        """Make the path of given weights absolute, for the same reason."""
        return None if value is None else value.expanduser().resolve()
