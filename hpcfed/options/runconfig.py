"""All options of every run, in one flat class made of the groups."""

from pathlib import Path

from pydantic import field_validator

from hpcfed import plugins
from hpcfed.options.aggregation import AggregationOptions
from hpcfed.options.compression import CompressionOptions
from hpcfed.options.data import DataOptions
from hpcfed.options.declare import OptionGroup
from hpcfed.options.devices import DeviceOptions
from hpcfed.options.machine import MachineOptions
from hpcfed.options.malicious import MaliciousOptions
from hpcfed.options.newcomers import NewcomerOptions
from hpcfed.options.optimiser import OptimiserOptions
from hpcfed.options.partition import PartitionOptions
from hpcfed.options.privacy import PrivacyOptions
from hpcfed.options.recording import RecordingOptions
from hpcfed.options.run import RunOptions
from hpcfed.options.training import TrainingOptions

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
