"""The options of a run: typed, with limits and defaults, from TOML, flags or keywords.

Each group of options has a file with the options, their checks, and what turns them on.
`declare` says how an option is written, `runconfig` joins the groups, `method` holds
the options that a method adds, `settings` turns what a user wrote into `Settings`, and
`checks` refuses what cannot work.

Nothing here imports torch: a command line is checked, and its mistakes are reported,
before anything heavy starts.
"""

from hpcfed.options.aggregation import expected_malicious
from hpcfed.options.checks import check, idle
from hpcfed.options.declare import (
    AS_GIVEN,
    LEFT_OUT,
    Choice,
    Need,
    Switch,
    facts_of,
    flag_of,
    is_option,
    option,
)
from hpcfed.options.method import LocalWork, Options, Training, check_layers
from hpcfed.options.privacy import check_privacy, weighs_by
from hpcfed.options.run import NEWCOMERS, SAMPLED
from hpcfed.options.runconfig import (
    GROUPS,
    RunConfig,
    ask_methods,
    facts,
    known,
    method_of,
    named,
    suggest_option,
)
from hpcfed.options.settings import Settings, check_text, check_unchanged, resolve
from hpcfed.options.tomlfile import by_option, load_toml, read_toml
from hpcfed.options.traits import Promises

__all__ = [
    "AS_GIVEN", "GROUPS", "LEFT_OUT", "NEWCOMERS", "SAMPLED", "Choice", "LocalWork",
    "Need", "Options", "Promises", "RunConfig", "Settings", "Switch", "Training",
    "ask_methods", "by_option", "check", "check_layers", "check_privacy", "check_text",
    "check_unchanged", "expected_malicious", "facts", "facts_of", "flag_of", "idle",
    "is_option", "known", "load_toml", "method_of", "named", "option", "read_toml",
    "resolve", "suggest_option", "weighs_by",
]  # fmt: skip
