"""Runs tests/system/scripts/survives.py on a simulated device, with the same arguments.

Prints what was not in order on the device.
"""

import gc
import runpy
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Become a rank with a device, and run the script."""
    sys.path[0] = str(ROOT)
    if "torch" not in sys.modules:  # otherwise this process was forked from one that has a device
        from tests.phantom import rank

        rank.become()
    from shardwise.net.launchers import detection
    from tests.phantom import abortable
    from tests.phantom.host import Host
    from tests.phantom.streams import Device

    abortable.install()
    identify = detection.identify
    detection.identify = lambda: replace(identify(), own_gpus=True)
    Device.order.begin()
    with Host():
        runpy.run_path(str(ROOT / "tests/system/scripts/survives.py"), run_name="__main__")
        gc.collect()
    Device.order.nbytes()  # freed blocks are noticed only when they are looked up
    print("not in order:", Device.order.races[:5])


if __name__ == "__main__":
    main()
