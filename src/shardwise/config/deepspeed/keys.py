"""Lists each key of DeepSpeed's JSON: what it becomes here, is ignored as, or is refused for. Pure.

The names are those of DeepSpeed 0.19.8; docs/reference/deepspeed_keys.md has this table.
"""

from __future__ import annotations

from dataclasses import dataclass

MAPPED, TUNING, REFUSED = "mapped", "ignored", "refused"


@dataclass(frozen=True)
class Key:
    """A key of the JSON by its dotted `name`. `text` says what it becomes, why it changes nothing
    here, or what to do instead. `takes` is the kind of its value; an "open" section has any keys.
    """

    name: str
    kind: str
    text: str
    takes: str = "any"


def _keys(kind: str, section: str, *rows: tuple[str, str] | tuple[str, str, str]) -> list[Key]:
    prefix = f"{section}." if section else ""
    return [Key(prefix + name, kind, *rest) for name, *rest in rows]


_MEMORY = "how fast memory is filled and freed, which buckets and units decide here"
_WIRE = "how collectives are cut; see --bucket-mb"
_DISK = "how the disk is read and written, which --offload-* decides by itself"
_WATCH = "see --timeline"
_SCRIPT = "the model or optimizer of the script decides"
_NOT_HERE = "leave it out: Shardwise has nothing like it"

_TRAINING = _keys(
    MAPPED,
    "",
    ("train_batch_size", "the total batch of a step: micro x accumulation x workers", "whole"),
    ("train_micro_batch_size_per_gpu", "the batch of `training_data`; --micro-batch-size", "whole"),
    ("gradient_accumulation_steps", "losses are divided by it; a step each so often", "whole"),
    ("managed_gradient_accumulation", "false: every `step()` updates", "switch"),
    ("gradient_clipping", "`engine.step(max_norm=)`; 1.0 where it is left out, 0 is off", "number"),
    ("gradient_allreduce_op", "mean; sum adds up the workers' losses (stages 0 to 2)", "word"),
    ("steps_per_print", "a line each so many steps", "whole"),
    ("dataloader_drop_last", "the last short batch of `training_data` is left out", "switch"),
    ("sequence_parallel_size", "1 alone", "whole"),
    ("data_parallel_size", "checked against the run", "whole"),
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
        ("check_grad_overflow", "--nonfinite skip, or stop where it is false", "switch"),
    ),
    *_keys(TUNING, "bf16", ("immediate_grad_update", "gradients are added in fp32 at once")),
    *_keys(
        REFUSED,
        "bf16",
        ("bf16_master_weights_and_grads", "masters are fp32 here: leave it out"),
        ("bf16_optimizer_states", "optimizer state is fp32 here: leave it out"),
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
        ("hysteresis", "the scale is halved at once"),
        ("consecutive_hysteresis", "the scale is halved at once"),
        ("min_loss_scale", "the scale has no lower bound"),
    ),
    *_keys(
        REFUSED, "fp16", ("fp16_master_weights_and_grads", "masters are fp32 here: leave it out")
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
        ("keep_in_fp32_modules", "masters are fp32 here"),
    ),
    *_keys(
        REFUSED,
        "data_types",
        ("param_dtype", "say it as bf16.enabled: leave it out"),
        ("buffer_dtype", "buffers go with the precision: leave it out"),
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
        ("reduce_scatter", "the placement decides: reduce-scatter where state is sharded"),
        ("use_multi_rank_bucket_allreduce", _WIRE),
        ("allgather_partitions", _WIRE),
        ("allgather_bucket_size", _WIRE),
        ("allgather_size", _WIRE),
        ("compute_grad_norm", "the norm travels with what is sent anyway"),
        ("load_from_fp32_weights", "a checkpoint has the fp32 masters"),
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
        ("override_module_apply", "apply() sees whole parameters in full_parameters alone"),
        ("log_trace_cache_warnings", "there is no such cache"),
        ("enable_sanity_checks", "ranks are compared in any case"),
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
        ("leaf_module", "a mixture-of-experts block is one unit by itself; see --units", "open"),
    ),
    *_keys(
        REFUSED,
        "zero_optimization",
        ("offload_optimizer.ratio", "state rests in one place: write 1.0, or leave it out"),
        ("offload_optimizer.super_offload", _NOT_HERE),
        ("zenflow", _NOT_HERE, "open"),
        ("zero_quantized_weights", "weights travel as they are: leave it out"),
        ("zero_quantized_nontrainable_weights", "weights travel as they are: leave it out"),
        ("zero_quantized_gradients", "gradients travel as they are: leave it out"),
        ("zeropp_loco_param", "gradients travel as they are: leave it out", "open"),
        ("mics_shard_size", "shard within hosts by --shard-within host"),
        ("mics_hierarchical_params_gather", "shard within hosts by --shard-within host"),
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
        ("partition_activations", "it is about deepspeed.checkpointing; see --activations"),
        ("contiguous_memory_optimization", _MEMORY),
        ("number_checkpoints", "it is about deepspeed.checkpointing"),
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
        ("tensor_parallel", "autotp_size says it", "open"),
        ("tp", "autotp_size says it", "open"),
        ("keep_module_on_host", _MEMORY),
        ("vocab_parallel_lm_head", "known shapes are found"),
        ("vocab_parallel_ce_backend", "see sw.cross_entropy"),
        ("preset_model", "known shapes are found"),
    ),
    *_keys(
        REFUSED,
        "tensor_parallel",
        ("partition_config", "say it as sw.Engine(tensor_plan=)", "open"),
        ("injection_policy_tuple", "say it as sw.Engine(tensor_plan=)"),
        ("tp_grain_size", "layers are split evenly: leave it out"),
        ("replace_with_kernel_inject", "the model's own kernels train it: leave it out"),
    ),
    *_keys(
        MAPPED,
        "pipeline",
        (
            "activation_checkpoint_interval",
            "layers of a PipelineModule that are run again in backward, so many in a row",
            "whole",
        ),
    ),
    *_keys(
        TUNING,
        "pipeline",
        ("stages", "PipelineModule(num_stages=) and --pipeline say it"),
        ("partition", "PipelineModule(partition_method=) says it"),
        ("seed_layers", "PipelineModule(seed_layers=) says it"),
        ("use_reentrant", "what is run again never needs inputs with gradients"),
        ("pipe_partitioned", _WIRE),
        ("grad_partitioned", _WIRE),
    ),
    *_keys(
        REFUSED,
        "",
        ("expert_parallel", _NOT_HERE, "open"),
        ("use_data_before_expert_parallelism", _NOT_HERE),
        ("hybrid_engine", "generate inside engine.uneven()", "open"),
    ),
]
_WATCHED = [
    *_keys(
        MAPPED,
        "tensorboard",
        (
            "enabled",
            "Train/Samples/lr, train_loss, loss_scale: TensorBoard's events",
            "switch",
        ),
        ("output_path", "their folder", "path"),
        ("job_name", "a folder in it", "word"),
    ),
    *_keys(
        MAPPED,
        "csv_monitor",
        ("enabled", "the same values as files of comma-separated values", "switch"),
        ("output_path", "their folder", "path"),
        ("job_name", "a folder in it", "word"),
    ),
    *_keys(
        TUNING,
        "",
        ("wall_clock_breakdown", _WATCH),
        ("memory_breakdown", _WATCH),
        ("dump_state", "sw.Engine.describe() prints the states"),
        ("log_level", "lines at the start are left out by --quiet"),
        ("flops_profiler", _WATCH, "open"),
        ("comms_logger", _WATCH, "open"),
        ("timers", _WATCH, "open"),
        ("disable_python_gc", "Python's collector is the script's own"),
        ("vocabulary_size", "it only warns"),
    ),
    *_keys(
        REFUSED,
        "",
        ("wandb", "log from the script: tensorboard and csv_monitor are written", "open"),
        ("comet", "log from the script: tensorboard and csv_monitor are written", "open"),
    ),
]
_OTHERS = [
    *_keys(
        MAPPED,
        "checkpoint",
        ("tag_validation", "tags that differ: Warn, Ignore (rank 0's is everyone's), Fail", "word"),
    ),
    *_keys(
        TUNING,
        "",
        ("communication_data_type", "16-bit gradients are added in fp32; see --reduce-dtype"),
        ("seq_parallel_communication_data_type", "16-bit gradients are added in fp32"),
        ("prescale_gradients", "gradients are added in fp32, and scaled before"),
        ("gradient_predivide_factor", "gradients are added in fp32, and scaled before"),
        ("disable_allgather", _WIRE),
        ("zero_allow_untested_optimizer", "optimizers are tried on small tensors"),
        ("zero_force_ds_cpu_optimizer", "any optimizer updates where its state rests"),
        ("aio", _DISK, "open"),
        ("checkpoint.use_node_local_storage", "a checkpoint is one folder that all hosts see"),
        ("checkpoint.load_universal", "any number of workers loads any checkpoint"),
        ("checkpoint.parallel_write", "all workers write their parts in any case", "open"),
        ("checkpoint.writer", "all workers write their parts in any case", "open"),
        ("checkpoint.checkpoint_serialization", "a checkpoint is safetensors and JSON"),
        ("fp32_allreduce", "16-bit gradients are added in fp32"),
    ),
    *_keys(
        REFUSED,
        "",
        ("amp", "say it as torch_autocast, fp16 or bf16", "open"),
        ("sparse_gradients", "gradients are added dense: leave it out"),
        ("sparse_attention", _NOT_HERE, "open"),
        ("compression_training", _NOT_HERE, "open"),
        ("quantize_training", _NOT_HERE, "open"),
        ("weight_quantization", _NOT_HERE, "open"),
        ("eigenvalue", _NOT_HERE, "open"),
        ("progressive_layer_drop", _NOT_HERE, "open"),
        ("curriculum_learning", "order the data in the script", "open"),
        ("data_efficiency", "order the data in the script", "open"),
        ("elasticity", "any number of workers resumes any checkpoint: leave it out", "open"),
        ("autotuning", "leave it out; shardwise scale measures a script", "open"),
        ("compile", "units are compiled by --compile", "open"),
        ("graph_harvesting", _NOT_HERE),
        ("datastates_ckpt", "sw.Engine.save(background=True) saves beside training", "open"),
        ("nebula", "sw.Engine.save(background=True) saves beside training", "open"),
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
"""All of them, by dotted name."""

ALIASES = {
    "bfloat16": "bf16",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": (
        "zero_optimization.stage3_param_persistence_threshold"
    ),
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
}
"""Other spellings that DeepSpeed takes."""

SECTIONS = {name.rpartition(".")[0] for name in KEYS if "." in name}
"""Keys whose value is an object of keys of its own."""
