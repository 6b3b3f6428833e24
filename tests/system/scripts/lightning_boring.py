"""A script for stock Lightning that does not use Shardwise, in the form of Lightning's bug reports.

Arguments: the package (lightning.pytorch or pytorch_lightning), the model of its demos, the
strategy, and the number of devices. Prints the weights and the logged metrics.
"""

import sys
import warnings
from importlib import import_module

import torch
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
package, model, strategy, devices = sys.argv[1:5]
pl = import_module(package)
boring = import_module(f"{package}.demos.boring_classes")


class Model(getattr(boring, model)):
    def validation_step(self, batch, index):
        self.log("valid", super().validation_step(batch, index)["x"], sync_dist=True)

    def test_step(self, batch, index):
        self.log("tested", super().test_step(batch, index)["y"], sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return self.rows(64)

    def val_dataloader(self):
        return self.rows(7)

    test_dataloader = val_dataloader

    def rows(self, count):
        torch.manual_seed(count)
        rows = boring.RandomDataset(32, count)
        return DataLoader(rows, batch_size=4 // self.trainer.world_size)


def run():
    torch.manual_seed(0)
    model = Model()
    trainer = pl.Trainer(
        default_root_dir=".",
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        limit_train_batches=5,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        max_epochs=1,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    valid = trainer.callback_metrics["valid"].item()  # a test discards the metrics of a fit
    (tested,) = trainer.test(model, verbose=False)
    if trainer.is_global_zero:
        weights = " ".join(f"{value:.4f}" for value in model.layer.weight[0, :4].tolist())
        print("loss", f"{valid:.4f} {tested['tested']:.4f}", weights)
        print("by", type(trainer.strategy).__name__, trainer.world_size)
        saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
        print("saved", tuple(saved["state_dict"]["layer.weight"].shape))


if __name__ == "__main__":
    run()
