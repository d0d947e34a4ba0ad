"""All options of every run, in one flat class made of the groups."""

from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo, field_validator

from hpcfed import plugins
from hpcfed.options.aggregation import AggregationOptions
from hpcfed.options.compression import CompressionOptions
from hpcfed.options.data import DataOptions
from hpcfed.options.declare import OptionGroup, facts_of
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


RECORDED: tuple[type[OptionGroup], ...] = (
    RunOptions,
    NewcomerOptions,
    DataOptions,
    PartitionOptions,
    TrainingOptions,
    OptimiserOptions,
    AggregationOptions,
    MaliciousOptions,
    CompressionOptions,
    DeviceOptions,
    PrivacyOptions,
    RecordingOptions,
    MachineOptions,
)
"""The groups in the order in which records list their options."""


class RunConfig(MachineOptions, PrivacyOptions, OptimiserOptions):
    """The options that every run has, whatever its method."""

    @field_validator("*")
    @classmethod
    def whole_path(cls, value: Any, info: ValidationInfo) -> Any:
        """Make the path of a user's Python file absolute: the record must be valid in
        any folder.
        """
        assert info.field_name is not None
        names_code = facts_of(cls.model_fields[info.field_name]).names_code
        return plugins.absolute(value) if names_code else value

    @field_validator("init")
    @classmethod
    def whole_folder(cls, value: Path | None) -> Path | None:
        """Make the path of initial weights absolute, for the same reason."""
        return None if value is None else value.expanduser().resolve()


@cache
def recorded_order() -> tuple[str, ...]:
    """Return all options of every run in the order of a record."""
    return tuple(name for group in RECORDED for name in group.declared())
