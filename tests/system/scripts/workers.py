"""Read for ever through DataLoader workers, each rank on its own."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Endless(Dataset[torch.Tensor]):
    """Items that take a moment."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.tensor(index)


for count, _ in enumerate(DataLoader(Endless(), num_workers=2)):
    if count == 2:
        print("reading")
