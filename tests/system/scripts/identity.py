"""Print who this rank is, and the arguments that it was given."""

import json
import os
import sys

from shardwise.net.launchers import detection as launcher_detection

identity = launcher_detection.detect(os.environ)
print(
    json.dumps(
        {
            "rank": identity.rank,
            "size": identity.size,
            "local_rank": identity.local_rank,
            "launcher": identity.launcher,
            "arguments": sys.argv[1:],
        }
    )
)
