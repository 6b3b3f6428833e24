"""The file system that contains a folder."""

from pathlib import Path

import pytest

from shardwise.tiers.direct_io import Mount, find

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:25 / /run rw shared:5 master:2 - tmpfs tmpfs rw
31 30 8:1 / /run/disk\0401 rw - xfs /dev/sda1 rw
32 27 8:2 / /data rw - xfs /dev/sdb1 rw
33 27 0:30 / /data rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("folder", "mount"),
    [
        ("/", Mount(Path("/"), "ext4")),
        ("/home/me", Mount(Path("/"), "ext4")),
        ("/running", Mount(Path("/"), "ext4")),
        ("/run/user", Mount(Path("/run"), "tmpfs")),
        ("/run/disk 1/deep", Mount(Path("/run/disk 1"), "xfs")),
        ("/data/deep", Mount(Path("/data"), "tmpfs")),
    ],
)
def test_finds_the_mount_of_a_folder(folder: str, mount: Mount) -> None:
    assert find(Path(folder), TABLE) == mount
