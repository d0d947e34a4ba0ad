"""All options of every run, in one flat class made of the groups."""

from hpcfed.config.aggregation import AggregationOptions
from hpcfed.config.data import DataOptions
from hpcfed.config.declare import OptionGroup
from hpcfed.config.machine import MachineOptions
from hpcfed.config.malicious import MaliciousOptions
from hpcfed.config.newcomers import NewcomerOptions
from hpcfed.config.partition import PartitionOptions
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
    AggregationOptions,
    MaliciousOptions,
    MachineOptions,
)
"""The groups in the order of `hpcfed run --help`."""


# Pydantic lists the fields of the last base first, and records follow its order: data,
# partition and training, then aggregation, attacks and the machine. The groups of the
# run and of newcomers come before all of them, because others inherit them.
class RunConfig(MachineOptions, MaliciousOptions, AggregationOptions, TrainingOptions):
    """The options that every run has, whatever its method."""
