"""A run sees the user's files, and what it writes does not reach them."""

import os
from pathlib import Path

import pytest

from shardwise.tools.verify.stock.own_files import MOST_IN_FOLDER, detach, make_view


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "me" / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.txt").write_text("rows")
    (folder / "last.pt").write_text("theirs")
    (folder / ".git").mkdir()
    (folder / "many").mkdir()
    for number in range(MOST_IN_FOLDER + 1):
        (folder / "many" / str(number)).touch()
    (tmp_path / "me" / "shared.txt").write_text("above")
    return folder


def test_shows_files_below_and_above_the_current_folder(project: Path) -> None:
    own = project / "temporary"
    own.mkdir()
    place = make_view(own / "view", project, hidden=own)
    assert not (place / "temporary").exists()  # the view does not show itself
    assert (place / "data" / "train.txt").read_text() == "rows"
    assert Path(os.path.normpath(place / ".." / "shared.txt")).read_text() == "above"
    assert not (place / "data").is_symlink()
    assert (place / ".git").is_symlink()
    assert (place / "many").is_symlink()


def test_writes_stay_in_the_view(project: Path, tmp_path: Path) -> None:
    view = tmp_path / "view"
    place = make_view(view, project, hidden=view)
    root = str(view.resolve()) + os.sep
    detach(str(place / "last.pt"), root, copies=False)  # as before open(..., "w")
    (place / "last.pt").write_text("ours")
    detach(str(place / "data" / "train.txt"), root, copies=True)  # as before open(..., "a")
    with (place / "data" / "train.txt").open("a") as file:
        file.write(" and more")
    assert (place / "data" / "train.txt").read_text() == "rows and more"
    (place / "data" / "new.txt").write_text("ours")
    assert (project / "last.pt").read_text() == "theirs"
    assert (project / "data" / "train.txt").read_text() == "rows"
    assert not (project / "data" / "new.txt").exists()


def test_leaves_links_outside_of_the_view(project: Path, tmp_path: Path) -> None:
    link = project / "link"
    link.symlink_to(project / "last.pt")
    detach(str(link), str(tmp_path / "view") + os.sep, copies=False)
    assert link.is_symlink()
