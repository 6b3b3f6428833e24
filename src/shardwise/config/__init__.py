"""Defines the settings of a run, and merges them from five sources.

The sources, in order of precedence:

1. a flag of `shardwise run`
2. an environment variable SHARDWISE_<NAME>, for example under torchrun or srun
3. a TOML file
4. a DeepSpeed JSON config
5. a keyword argument in the script

The files:

- values.py: parsers from text to types
- settings.py: the settings
- sources.py: reads and merges the sources
- effect.py: detects settings that have no effect
- deepspeed/: reads a DeepSpeed JSON config as a source
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
    winning_values,
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
    "winning_values",
]
