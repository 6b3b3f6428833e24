"""DeepSpeed's interface over this engine: `import shardwise.deepspeed as deepspeed`.

initialize.py     a model, an optimizer and a JSON become an engine
engine.py         the engine object: backward, step, checkpoints
configured.py     what it answers of itself
outputs.py        the dtypes of a module's outputs
optimizers.py     optimizers and schedules by DeepSpeed's names
schedules.py      the five schedules
loader.py         the loader of training_data
monitor.py        values for TensorBoard and as comma-separated values
checkpoints.py    save_checkpoint and load_checkpoint
comm.py           collectives between the workers
"""

from shardwise.deepspeed import comm
from shardwise.deepspeed.comm import init_distributed
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.initialize import add_config_arguments, initialize

__all__ = ["DeepSpeedEngine", "add_config_arguments", "comm", "init_distributed", "initialize"]
