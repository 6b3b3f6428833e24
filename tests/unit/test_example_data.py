"""Data that the tutorials read: IDX files of images, and text divided into lanes."""

import gzip
from pathlib import Path

import pytest
import torch

from tests.unit.test_example_text import import_example

images = import_example("helpers.images")
lanes = import_example("helpers.lanes")


def idx(array: torch.Tensor) -> bytes:
    """A uint8 array as an IDX file."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.dim())) + sizes + array.numpy().tobytes()


def write_images(folder: Path, *, packed: bool, width: int = 5) -> None:
    for number, (pictures, labels) in enumerate(images.NAMES.values()):
        rows = 3 - number
        files = {
            pictures: torch.full((rows, 5, width), 51, dtype=torch.uint8),
            labels: torch.arange(rows, dtype=torch.uint8),
        }
        for name, array in files.items():
            data = idx(array)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [False, True])
def test_the_files_of_mnist(tmp_path: Path, packed: bool) -> None:
    write_images(tmp_path, packed=packed)
    found = images.read(tmp_path)
    pixels, labels = found.training.tensors
    assert pixels.shape == (3, 1, 5, 5)
    assert pixels.max() == pytest.approx(0.2)
    assert labels.tolist() == [0, 1, 2]
    assert len(found.validation) == 2
    assert found.height == 5


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x00\x00\x0d\x01" + bytes(8), "not an IDX file of bytes"),
        (idx(torch.zeros(7, dtype=torch.uint8))[:-1], "has the wrong length"),
        (b"", "not an IDX file"),
    ],
)
def test_files_that_are_something_else_are_refused(
    tmp_path: Path, data: bytes, complaint: str
) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(images.ImagesError, match=complaint):
        images.idx(tmp_path / "file", dims=1)


def test_a_gzip_file_with_damaged_bytes_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(idx(torch.arange(200, dtype=torch.uint8))))
    data[10] = 0xFF  # an invalid type for the first block
    (tmp_path / "file.gz").write_bytes(data)
    with pytest.raises(images.ImagesError, match="cannot be read"):
        images.idx(tmp_path / "file.gz", dims=1)


def test_images_that_are_not_square_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path, packed=False, width=6)
    with pytest.raises(images.ImagesError, match="5 x 6 are not square"):
        images.read(tmp_path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(images.ImagesError, match="has no train-images-idx3-ubyte"):
        images.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "flag"), [("mnist", "--batch-size"), ("resnet", "--batch-size"), ("resnet", "--crop")]
)
def test_a_size_of_nothing_is_refused(
    name: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = import_example(name)
    monkeypatch.setattr("sys.argv", [name, flag, "0"])
    with pytest.raises(SystemExit):
        script.arguments()
    assert "above 0" in capsys.readouterr().err


def test_a_total_batch_is_the_same_window_of_every_lane() -> None:
    read = lanes.Lanes(torch.arange(15), lanes=3, steps=2)
    assert len(read) == 6
    assert [read[item][0].tolist() for item in range(6)] == [
        [0, 1],
        [5, 6],
        [10, 11],
        [2, 3],
        [7, 8],
        [12, 13],
    ]
    assert read[5][1].tolist() == [13, 14]


def test_the_last_window_may_be_shorter_and_every_token_is_predicted_once() -> None:
    read = lanes.Lanes(torch.arange(24), lanes=2, steps=4)
    predicted = sorted(int(token) for _, targets in read_all(read) for token in targets)
    assert predicted == [*range(1, 12), *range(13, 24)]
    with pytest.raises(lanes.TextError, match="too few for 20 lanes"):
        lanes.Lanes(torch.arange(24), lanes=20, steps=4)


def read_all(read):
    return [read[item] for item in range(len(read))]


def test_rare_and_unseen_words_are_unknown(tmp_path: Path) -> None:
    for part, text in (("train", "a b a\n\nb a c"), ("valid", "c a"), ("test", "d")):
        (tmp_path / f"ptb.{part}.txt").write_text(text)
    text = lanes.read(tmp_path, most=4)
    assert text.vocabulary == ["<unk>", "a", "<eos>", "b"]
    assert text.training.tolist() == [1, 3, 1, 2, 3, 1, 0, 2]
    assert text.validation.tolist() == [0, 1, 2]
    assert text.test.tolist() == [0, 2]
