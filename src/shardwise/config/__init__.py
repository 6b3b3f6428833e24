"""Defines the settings of a run, and decides which of five sources wins.

A setting comes from, in order of precedence: a flag of `shardwise run`, an environment variable
SHARDWISE_<NAME> (for those who start with torchrun or srun), a TOML file, DeepSpeed's JSON, a
keyword in the script.

- values.py: the types, the one place where strings become them
- settings.py: the settings
- sources.py: where they come from
- effect.py: those that would change nothing
- deepspeed/: DeepSpeed's JSON as a source of them
"""

from shardwise.config.effect import OF_A_RUN, OF_AN_ENGINE, idle
from shardwise.config.settings import (
    FIELDS,
    PRECISIONS,
    SCHEDULES,
    Settings,
    check_contradictions,
    flag,
)
from shardwise.config.sources import (
    FILE,
    FLAG,
    FLAGS_ALONE,
    FLAGS_VARIABLE,
    HOROVOD_TIMELINE,
    OF_THE_ENGINE,
    PREFIX,
    SettingsSource,
    as_given,
    json_of_deepspeed,
    load,
    parse,
    refuse_elsewhere,
    resolve,
    sources,
    unknown_key,
    winning,
)

__all__ = [
    "FIELDS",
    "FILE",
    "FLAG",
    "FLAGS_ALONE",
    "FLAGS_VARIABLE",
    "HOROVOD_TIMELINE",
    "OF_AN_ENGINE",
    "OF_A_RUN",
    "OF_THE_ENGINE",
    "PRECISIONS",
    "PREFIX",
    "SCHEDULES",
    "Settings",
    "SettingsSource",
    "as_given",
    "check_contradictions",
    "flag",
    "idle",
    "json_of_deepspeed",
    "load",
    "parse",
    "refuse_elsewhere",
    "resolve",
    "sources",
    "unknown_key",
    "winning",
]
