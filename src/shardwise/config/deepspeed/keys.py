"""Defines the table of DeepSpeed's config keys: each is mapped to a setting, ignored or rejected.

The table covers DeepSpeed 0.19.8, and is published in docs/reference/deepspeed_keys.md. After a
change, run `python scripts/deepspeed_keys.py` to update that page.
"""

from __future__ import annotations

from dataclasses import dataclass

MAPPED, TUNING, REFUSED = "mapped", "ignored", "refused"


@dataclass(frozen=True)
class Key:
    """A key of a DeepSpeed config.

    Args:
        name: The dotted name.
        kind: MAPPED, TUNING or REFUSED.
        text: The equivalent in Shardwise, the reason for ignoring it, or what to write instead.
        takes: The type of its value. An "open" section may contain any keys.
    """

    name: str
    kind: str
    text: str
    takes: str = "any"


def _keys(kind: str, section: str, *rows: tuple[str, str] | tuple[str, str, str]) -> list[Key]:
    prefix = f"{section}." if section else ""
    return [Key(prefix + name, kind, *rest) for name, *rest in rows]


_MEMORY = "tunes memory use, which buckets and units determine here"
_WIRE = "splits collectives; see --bucket-mb"
_DISK = "tunes disk access, which --offload-* does automatically"
_WATCH = "see --timeline"
_SCRIPT = "the script's own model or optimizer determines it"
_NOT_HERE = "leave it out: Shardwise has no such feature"

_TRAINING = _keys(
    MAPPED,
    "",
    ("train_batch_size", "the total batch of a step: micro x accumulation x workers", "whole"),
    ("train_micro_batch_size_per_gpu", "the batch of `training_data`; --micro-batch-size", "whole"),
    ("gradient_accumulation_steps", "backwards per step; losses are divided by it", "whole"),
    ("managed_gradient_accumulation", "false: every `step()` updates", "switch"),
    ("gradient_clipping", "`engine.step(max_norm=)`; default 1.0, 0 turns it off", "number"),
    ("gradient_allreduce_op", "mean; sum adds the workers' losses (stages 0 to 2)", "word"),
    ("steps_per_print", "steps between two lines of progress", "whole"),
    ("dataloader_drop_last", "drop the last short batch of `training_data`", "switch"),
    ("sequence_parallel_size", "only 1", "whole"),
    ("data_parallel_size", "compared with the number of workers", "whole"),
)
_OPTIMIZER = [
    *_keys(
        MAPPED,
        "optimizer",
        ("type", "Adam (AdamW unless adam_w_mode is false), AdamW, Adagrad, Muon, or torch's"),
        ("params", "its keywords", "open"),
    ),
    *_keys(TUNING, "optimizer", ("legacy_fusion", _SCRIPT)),
    *_keys(
        MAPPED,
        "scheduler",
        ("type", "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or torch's"),
        ("params", "its keywords", "open"),
    ),
]
_PRECISION = [
    *_keys(
        MAPPED,
        "bf16",
        ("enabled", "--precision bf16 (fp32 masters)", "switch"),
        ("check_grad_overflow", "--nonfinite skip, or stop if it is false", "switch"),
    ),
    *_keys(
        TUNING,
        "bf16",
        ("immediate_grad_update", "gradients are always added in fp32 immediately"),
    ),
    *_keys(
        REFUSED,
        "bf16",
        ("bf16_master_weights_and_grads", "leave it out: master weights are fp32 here"),
        ("bf16_optimizer_states", "leave it out: optimizer state is fp32 here"),
    ),
    *_keys(
        MAPPED,
        "fp16",
        ("enabled", "--precision fp16-mixed: weights stay fp32, autocast computes", "switch"),
        ("loss_scale", "a static scale; 0: dynamic", "number"),
        ("initial_scale_power", "the first dynamic scale, a power of 2", "whole"),
        ("loss_scale_window", "steps until the scale doubles", "whole"),
    ),
    *_keys(
        TUNING,
        "fp16",
        ("auto_cast", "autocast takes inputs of any dtype"),
        ("hysteresis", "the scale is halved immediately"),
        ("consecutive_hysteresis", "the scale is halved immediately"),
        ("min_loss_scale", "the scale has no lower bound"),
    ),
    *_keys(
        REFUSED,
        "fp16",
        ("fp16_master_weights_and_grads", "leave it out: master weights are fp32 here"),
    ),
    *_keys(
        MAPPED,
        "torch_autocast",
        ("enabled", "--precision bf16-mixed or fp16-mixed", "switch"),
        ("dtype", "bfloat16 or float16", "word"),
    ),
    *_keys(
        TUNING,
        "torch_autocast",
        ("lower_precision_safe_modules", "torch.autocast knows which operators are safe"),
    ),
    *_keys(
        TUNING,
        "data_types",
        ("grad_accum_dtype", "gradients are added in fp32", "word"),
        ("keep_in_fp32_modules", "master weights are fp32 here"),
    ),
    *_keys(
        REFUSED,
        "data_types",
        ("param_dtype", "write bf16.enabled instead"),
        ("buffer_dtype", "leave it out: buffers follow the precision"),
    ),
]
_ZERO = [
    *_keys(
        MAPPED,
        "zero_optimization",
        ("stage", "--zero", "whole"),
        ("reduce_bucket_size", "--bucket-mb, from elements of the parameters' dtype", "number"),
        ("overlap_comm", "false: --no-overlap", "switch"),
        ("zero_hpz_partition_size", "the ranks of a host: --shard-within host", "whole"),
        ("cpu_offload", "the old name of offload_optimizer", "switch"),
        ("cpu_offload_param", "the old name of offload_param", "switch"),
        ("offload_optimizer.device", "--offload-optimizer cpu or nvme:PATH", "word"),
        ("offload_optimizer.nvme_path", "the folder of nvme:PATH", "path"),
        ("offload_param.device", "--offload-params cpu or nvme:PATH; stage 3", "word"),
        ("offload_param.nvme_path", "the folder of nvme:PATH", "path"),
    ),
    *_keys(
        TUNING,
        "zero_optimization",
        ("contiguous_gradients", "gradients are in flat buckets in any case"),
        ("reduce_scatter", "the placement decides: reduce-scatter if state is sharded"),
        ("use_multi_rank_bucket_allreduce", _WIRE),
        ("allgather_partitions", _WIRE),
        ("allgather_bucket_size", _WIRE),
        ("allgather_size", _WIRE),
        ("compute_grad_norm", "the norm is part of a message that every step sends"),
        ("load_from_fp32_weights", "a checkpoint holds the fp32 master weights"),
        ("elastic_checkpoint", "any number of workers loads any checkpoint"),
        ("sub_group_size", _MEMORY),
        ("cpu_offload_use_pin_memory", _MEMORY),
        ("stage3_prefetch_bucket_size", _MEMORY),
        ("stage3_param_persistence_threshold", _MEMORY),
        ("stage3_model_persistence_threshold", _MEMORY),
        ("stage3_max_live_parameters", _MEMORY),
        ("stage3_max_reuse_distance", _MEMORY),
        ("stage3_module_granularity_threshold", "see --units"),
        ("stage3_use_all_reduce_for_fetch_params", _WIRE),
        ("stage3_allgather_sequential", _WIRE),
        ("stage3_gather_16bit_weights_on_model_save", "save_16bit_model always gathers"),
        ("stage3_gather_fp16_weights_on_model_save", "save_16bit_model always gathers"),
        ("ignore_unused_parameters", "an unused parameter keeps its value, as in torch"),
        ("legacy_stage1", "there is one engine for all stages"),
        ("round_robin_gradients", _MEMORY),
        ("parameter_alignment", _MEMORY),
        ("memory_efficient_linear", _MEMORY),
        ("pipeline_loading_checkpoint", "any placement loads any checkpoint"),
        ("override_module_apply", "apply() sees whole parameters only in full_parameters"),
        ("log_trace_cache_warnings", "there is no such cache"),
        ("enable_sanity_checks", "ranks are always compared"),
        ("save_muon_momentum_buffer_in_memory", _MEMORY),
        ("offload_optimizer.buffer_count", _DISK),
        ("offload_optimizer.buffer_size", _DISK),
        ("offload_optimizer.pin_memory", _MEMORY),
        ("offload_optimizer.pipeline_read", _DISK),
        ("offload_optimizer.pipeline_write", _DISK),
        ("offload_optimizer.pipeline", _DISK),
        ("offload_optimizer.fast_init", _DISK),
        ("offload_optimizer.cpuadam_cores_perc", "torch's threads update"),
        ("offload_param.buffer_count", _DISK),
        ("offload_param.buffer_size", _DISK),
        ("offload_param.max_in_cpu", _DISK),
        ("offload_param.pin_memory", _MEMORY),
        ("leaf_module", "a mixture-of-experts block is always one unit; see --units", "open"),
    ),
    *_keys(
        REFUSED,
        "zero_optimization",
        ("offload_optimizer.ratio", "write 1.0, or leave it out: a state is on one tier"),
        ("offload_optimizer.super_offload", _NOT_HERE),
        ("zenflow", _NOT_HERE, "open"),
        ("zero_quantized_weights", "leave it out: weights are sent unquantized"),
        ("zero_quantized_nontrainable_weights", "leave it out: weights are sent unquantized"),
        ("zero_quantized_gradients", "leave it out: gradients are sent unquantized"),
        ("zeropp_loco_param", "leave it out: gradients are sent unquantized", "open"),
        ("mics_shard_size", "write --shard-within host to shard within hosts"),
        ("mics_hierarchical_params_gather", "write --shard-within host to shard within hosts"),
    ),
]
_ACTIVATIONS = [
    *_keys(
        MAPPED,
        "activation_checkpointing",
        ("cpu_checkpointing", "--offload-activations cpu", "switch"),
    ),
    *_keys(
        TUNING,
        "activation_checkpointing",
        ("partition_activations", "for deepspeed.checkpointing; see --activations"),
        ("contiguous_memory_optimization", _MEMORY),
        ("number_checkpoints", "for deepspeed.checkpointing"),
        ("synchronize_checkpoint_boundary", _WATCH),
        ("profile", _WATCH),
    ),
]
_PARALLEL = [
    *_keys(MAPPED, "tensor_parallel", ("autotp_size", "--tensor", "whole")),
    *_keys(
        TUNING,
        "tensor_parallel",
        ("dtype", "the precision decides"),
        ("tp_overlap_comm", _WIRE),
        ("tensor_parallel", "autotp_size sets it", "open"),
        ("tp", "autotp_size sets it", "open"),
        ("keep_module_on_host", _MEMORY),
        ("vocab_parallel_lm_head", "layers to split are detected"),
        ("vocab_parallel_ce_backend", "see sw.cross_entropy"),
        ("preset_model", "layers to split are detected"),
    ),
    *_keys(
        REFUSED,
        "tensor_parallel",
        ("partition_config", "write sw.Engine(tensor_plan=) instead", "open"),
        ("injection_policy_tuple", "write sw.Engine(tensor_plan=) instead"),
        ("tp_grain_size", "leave it out: layers are split evenly"),
        ("replace_with_kernel_inject", "leave it out: training uses the model's own kernels"),
    ),
    *_keys(
        MAPPED,
        "pipeline",
        (
            "activation_checkpoint_interval",
            "recompute a PipelineModule's activations in groups of this many layers",
            "whole",
        ),
    ),
    *_keys(
        TUNING,
        "pipeline",
        ("stages", "PipelineModule(num_stages=) and --pipeline set it"),
        ("partition", "PipelineModule(partition_method=) sets it"),
        ("seed_layers", "PipelineModule(seed_layers=) sets it"),
        ("use_reentrant", "recomputed layers never need inputs with gradients"),
        ("pipe_partitioned", _WIRE),
        ("grad_partitioned", _WIRE),
    ),
    *_keys(
        REFUSED,
        "",
        ("expert_parallel", "start with --expert E instead", "open"),
        ("use_data_before_expert_parallelism", "consecutive workers share the experts (--expert)"),
        ("hybrid_engine", "generate inside engine.uneven()", "open"),
    ),
]
_WATCHED = [
    *_keys(
        MAPPED,
        "tensorboard",
        (
            "enabled",
            "TensorBoard events Train/Samples/lr, train_loss and loss_scale",
            "switch",
        ),
        ("output_path", "folder of the events", "path"),
        ("job_name", "subfolder of it", "word"),
    ),
    *_keys(
        MAPPED,
        "csv_monitor",
        ("enabled", "the same values as CSV files", "switch"),
        ("output_path", "folder of the files", "path"),
        ("job_name", "subfolder of it", "word"),
    ),
    *_keys(
        TUNING,
        "",
        ("wall_clock_breakdown", _WATCH),
        ("memory_breakdown", _WATCH),
        ("dump_state", "sw.Engine.describe() prints the states"),
        ("log_level", "--quiet leaves out the start lines"),
        ("flops_profiler", _WATCH, "open"),
        ("comms_logger", _WATCH, "open"),
        ("timers", _WATCH, "open"),
        ("disable_python_gc", "the script controls Python's garbage collector"),
        ("vocabulary_size", "DeepSpeed only warns about it"),
    ),
    *_keys(
        REFUSED,
        "",
        ("wandb", "log from the script, or write tensorboard or csv_monitor", "open"),
        ("comet", "log from the script, or write tensorboard or csv_monitor", "open"),
    ),
]
_OTHERS = [
    *_keys(
        MAPPED,
        "checkpoint",
        (
            "tag_validation",
            "if tags differ between workers: Warn, Ignore (take rank 0's), or Fail",
            "word",
        ),
    ),
    *_keys(
        TUNING,
        "",
        ("communication_data_type", "16-bit gradients are added in fp32; see --reduce-dtype"),
        ("seq_parallel_communication_data_type", "16-bit gradients are added in fp32"),
        ("prescale_gradients", "gradients are scaled first, then added in fp32"),
        ("gradient_predivide_factor", "gradients are scaled first, then added in fp32"),
        ("disable_allgather", _WIRE),
        ("zero_allow_untested_optimizer", "optimizers are tested on small tensors"),
        ("zero_force_ds_cpu_optimizer", "any optimizer runs on the device of its state"),
        ("aio", _DISK, "open"),
        ("checkpoint.use_node_local_storage", "a checkpoint is one folder that all hosts see"),
        ("checkpoint.load_universal", "any number of workers loads any checkpoint"),
        ("checkpoint.parallel_write", "all workers always write in parallel", "open"),
        ("checkpoint.writer", "all workers always write in parallel", "open"),
        ("checkpoint.checkpoint_serialization", "a checkpoint is safetensors and JSON"),
        ("fp32_allreduce", "16-bit gradients are added in fp32"),
    ),
    *_keys(
        REFUSED,
        "",
        ("amp", "write torch_autocast, fp16 or bf16 instead", "open"),
        ("sparse_gradients", "leave it out: gradients are reduced as dense tensors"),
        ("sparse_attention", _NOT_HERE, "open"),
        ("compression_training", _NOT_HERE, "open"),
        ("quantize_training", _NOT_HERE, "open"),
        ("weight_quantization", _NOT_HERE, "open"),
        ("eigenvalue", _NOT_HERE, "open"),
        ("progressive_layer_drop", _NOT_HERE, "open"),
        ("curriculum_learning", "order the data in the script", "open"),
        ("data_efficiency", "order the data in the script", "open"),
        ("elasticity", "leave it out: any number of workers resumes any checkpoint", "open"),
        ("autotuning", "leave it out: shardwise scale measures a script", "open"),
        ("compile", "write --compile, which compiles units", "open"),
        ("graph_harvesting", _NOT_HERE),
        ("datastates_ckpt", "write engine.save(background=True) instead", "open"),
        ("nebula", "write engine.save(background=True) instead", "open"),
    ),
]

KEYS = {
    key.name: key
    for part in (
        _TRAINING,
        _OPTIMIZER,
        _PRECISION,
        _ZERO,
        _ACTIVATIONS,
        _PARALLEL,
        _WATCHED,
        _OTHERS,
    )
    for key in part
}
"""All known keys, by dotted name."""

ALIASES = {
    "bfloat16": "bf16",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": (
        "zero_optimization.stage3_param_persistence_threshold"
    ),
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
}
"""Alternative spellings that DeepSpeed accepts, mapped to the usual ones."""

SECTIONS = {name.rpartition(".")[0] for name in KEYS if "." in name}
"""Keys whose value is an object that contains further keys."""
