"""Hints that translate names from DDP, FSDP, Accelerate, Fabric and DeepSpeed to Shardwise.

Code that rejects an unknown setting, flag, attribute or module name calls `hint` before it suggests
a similar name, because other libraries' names often resemble an unrelated Shardwise setting
(`zero_stage` and `stages`).
"""

from typing import TYPE_CHECKING, Any

_TABLE: tuple[tuple[str, str], ...] = (
    # the run and its ranks
    (
        "world.size is the number of workers; shardwise run -n N sets it.",
        "world_size num_processes num_proc nprocs nproc num_gpus n_gpus gpus devices get_world_size"
        " dp_world_size data_parallel_size dp_size num_replicas multi_gpu gpu_ids use_distributed"
        " multi_device",
    ),
    (
        "world.rank is the number of this worker.",
        "global_rank get_rank process_index get_global_rank machine_rank",
    ),
    (
        "world.local_rank is the rank on this host.",
        "local_process_index get_local_rank device_id device_ids get_node_local_rank output_device",
    ),
    (
        "world.data_rank is the rank among the data-parallel replicas.",
        "data_parallel_rank get_data_parallel_rank data_parallel_shard_rank",
    ),
    ("world.tensor_rank is the rank among the workers that split a layer.", "tensor_parallel_rank"),
    ("world.pipeline_rank is the pipeline stage of this worker.", "pipeline_parallel_rank"),
    (
        "Write world.is_main for rank 0; world.local_rank == 0 is the first rank of each host.",
        "is_main_process is_local_main_process is_global_zero is_rank_zero rank_zero_only"
        " on_main_process on_local_main_process is_last_process on_last_process on_process"
        " on_local_process",
    ),
    (
        'Write device="cpu" or device="cuda" in sw.init (flag --device).',
        "accelerator cpu use_cpu no_cuda get_accelerator",
    ),
    (
        "Write with world.main_first():",
        "main_process_first local_main_process_first rank_zero_first",
    ),
    ("Write world.print(...).", "print_rank_0 log_dist rank_zero_print rank_zero_info"),
    ("Write world.barrier().", "wait_for_everyone monitored_barrier synchronize"),
    (
        "Write world.sum(tensor) for a sum over the workers. stats.loss of engine.step() and "
        "sw.Metrics() are exact means over all samples.",
        "all_reduce allreduce all_reduce_coalesced reduce_loss ReduceOp",
    ),
    (
        "Write world.gather(value) for a list of every worker's value, or world.gather_rows(tensor)"
        " for the rows of the whole batch.",
        "all_gather allgather all_gather_object all_gather_into_tensor gather_object"
        " gather_for_metrics pad_across_processes all_gather_single all_gather_coalesced",
    ),
    (
        "Write world.broadcast_object(value).",
        "broadcast broadcast_object_list scatter scatter_object_list broadcast_tensors",
    ),
    (
        "Write world.share(batch) for this worker's rows.",
        "split_between_processes shard_batch",
    ),
    ("Write world.any(flag) so that all workers decide the same.", "set_trigger check_trigger"),
    (
        "Write world = sw.init(seed=0); Shardwise chooses the backend (--transport overrides it).",
        "init_process_group init_distributed init_device_mesh backend init_method dist_init"
        " dist_backend setup_distributed process_group new_group",
    ),
    (
        "Leave it out: the process leaves the group when it ends.",
        "destroy_process_group end_training destroy cleanup",
    ),
    (
        "Start the workers from the shell: shardwise run -n N train.py (torchrun works as well).",
        "launch spawn notebook_launcher debug_launcher",
    ),
    (
        "Several hosts: shardwise run -H node1:4,node2:4 train.py, or --nnodes N --rdzv-endpoint "
        "HOST:PORT.",
        "num_nodes num_machines master_addr master_port main_process_ip main_process_port"
        " node_rank include exclude",
    ),
    ("Write sw.init(seed=N), or --seed N.", "seed_everything set_seed set_random_seed manual_seed"),
    # the model and its wrapper
    (
        "Write engine = sw.Engine(model, optimizer). The model and the optimizer stay your own "
        "objects.",
        "DistributedDataParallel DDP DataParallel FullyShardedDataParallel FSDP fully_shard"
        " initialize prepare prepare_model prepare_optimizer prepare_scheduler setup setup_module"
        " setup_optimizers DeepSpeedEngine replicate",
    ),
    (
        "shardwise.accelerate.Accelerator replaces accelerate.Accelerator "
        "(docs/from_accelerate.md). In a loop of your own, write world = sw.init(seed=0) "
        "and sw.Engine(model, optimizer).",
        "Accelerator PartialState AcceleratorState",
    ),
    (
        "ShardwiseStrategy and ShardwiseFabricStrategy are in shardwise.lightning "
        "(docs/from_lightning.md).",
        "Fabric strategy ShardwiseStrategy ShardwiseFabricStrategy FSDPStrategy DDPStrategy"
        " DeepSpeedStrategy ModelParallelStrategy Trainer",
    ),
    (
        "The model has no wrapper: use the model that you passed to sw.Engine.",
        "module forward train eval parameters named_parameters unwrap_model unwrap",
    ),
    (
        "Leave it out: each backward detects which parameters have a gradient.",
        "find_unused_parameters static_graph gradient_as_bucket_view broadcast_buffers init_sync"
        " check_reduction sync_module_states skip_all_reduce_unused_params forward_sync_buffers"
        " param_init_fn use_orig_params limit_all_gathers forward_prefetch backward_prefetch"
        " batched_grad_copy overlap_comm contiguous_gradients device_placement rng_types"
        " reshard_after_forward reshard unshard delay_all_reduce_named_params",
    ),
    (
        "Write bucket_mb=25 (flag --bucket-mb).",
        "bucket_cap_mb bucket_cap_mb_list reduce_bucket_size allgather_bucket_size",
    ),
    (
        "Write units=... (flag --units) to name the modules that are gathered as one.",
        "auto_wrap_policy transformer_auto_wrap_policy size_based_auto_wrap_policy"
        " set_z3_leaf_modules stage3_max_live_parameters",
    ),
    (
        'Write wire="int8" with islands=N for slow links (docs/slow_links.md).',
        "register_comm_hook comm_hook powerSGD_hook LocalSGD PostLocalSGDOptimizer compression",
    ),
    (
        "Build a model that is too large for one device inside with sw.on_meta(): ...",
        "init_empty_weights init_on_device init_module empty_init sharded_model"
        " load_checkpoint_and_dispatch dispatch_model",
    ),
    # placement
    (
        "Write zero=0, 1, 2 or 3 (flag --zero): 1 shards the optimizer state, 2 the gradients too, "
        "3 the parameters too.",
        "zero_stage stage zero_level zero_optimization zero_optimization_stage sharding_strategy"
        " ShardingStrategy fsdp use_fsdp fsdp_plugin FullyShardedDataParallelPlugin"
        " ZeroRedundancyOptimizer DeepSpeedPlugin deepspeed_plugin zero3",
    ),
    (
        'Write offload_optimizer="cpu" and offload_params="cpu" (flags --offload-optimizer, '
        "--offload-params; nvme:FOLDER too).",
        "cpu_offload CPUOffload offload_policy CPUOffloadPolicy zero_cpu_offload offload_param"
        " offload_optimizer_device offload_param_device disk_offload DeepSpeedCPUAdam",
    ),
    (
        'Write shard_within="host" (flag --shard-within host).',
        "HYBRID_SHARD hybrid_shard zero_hpz_partition_size",
    ),
    (
        "Write tensor=T and pipeline=P in sw.init (flags --tensor, --pipeline).",
        "device_mesh DeviceMesh tp tp_size tp_plan tensor_parallel tensor_parallel_size"
        " tensor_model_parallel_size autotp_size torch_tp_plugin parallelism_config"
        " ParallelismConfig pp pp_size pipeline_parallel pipeline_parallel_size"
        " pipeline_model_parallel_size num_stages PipelineModule parallelize_module mesh"
        " torch_device_mesh megatron_lm_plugin",
    ),
    (
        'Write activations="recomputed" (flag --activations), or offload_activations="cpu".',
        "gradient_checkpointing activation_checkpointing gradient_checkpointing_enable"
        " enable_activation_checkpointing cpu_checkpointing recompute activation_checkpoint",
    ),
    (
        "Write sync_batch_norm=True (flag --sync-batch-norm).",
        "SyncBatchNorm sync_batchnorm sync_bn convert_sync_batchnorm",
    ),
    (
        'Write precision="bf16-mixed" or "fp16-mixed" (flag --precision).',
        "mixed_precision MixedPrecision MixedPrecisionPolicy mp_policy amp fp16 bf16 fp16_enabled"
        " bfloat16_enabled autocast use_amp torch_autocast_enabled param_dtype dtype fp8",
    ),
    (
        'Write sw.Engine(model, optimizer, scaler=scaler), or precision="fp16-mixed" (flag '
        "--precision) without a scaler.",
        "GradScaler grad_scaler unscale_gradients unscale_ initial_scale dynamic_loss_scale",
    ),
    ("Write compile=True (flag --compile).", "torch_compile dynamo_backend dynamo_plugin"),
    # batches
    (
        "Write sw.Loader(dataset, batch_size=TOTAL, shuffle=True), which gives each worker its "
        "share; it needs no DistributedSampler.",
        "DistributedSampler sampler DataLoader dataloader setup_dataloaders prepare_data_loader"
        " deepspeed_io training_data batch_size even_batches split_batches dispatch_batches"
        " join_uneven_inputs dataloader_config DistributedBatchSampler join replace_sampler"
        " use_distributed_sampler",
    ),
    (
        "Write for epoch in loader.epochs(N): the loader shuffles each epoch in another order.",
        "set_epoch set_seed_epoch",
    ),
    (
        "engine.track(loader=loader) and engine.resume(folder) continue inside an epoch.",
        "skip_first_batches use_stateful_dataloader",
    ),
    (
        "Write micro_batch_size=M in sw.Loader (flag --micro-batch-size) and for step in "
        "loader.steps(): for x, y in step: ...; losses are not divided by hand.",
        "gradient_accumulation_steps accumulate accumulate_grad_batches grad_accumulation_steps"
        " accumulation_steps gradient_accumulation_plugin no_sync no_backward_sync sync_gradients"
        " is_gradient_accumulation_boundary set_gradient_accumulation_boundary"
        " set_requires_gradient_sync trigger_sync_in_backward set_is_last_backward"
        " train_micro_batch_size_per_gpu train_batch_size",
    ),
    # a step
    ("Write engine.backward(loss).", "backward manual_backward lomo_backward scale_loss"),
    (
        "Write engine.step(); it clears the gradients as well.",
        "step optimizer_step step_scheduler_with_optimizer",
    ),
    (
        "Write engine.forward_backward(loss_of, *batch), then engine.step().",
        "train_batch prepare_pippy eval_batch",
    ),
    (
        "Write engine.step(max_norm=1.0), which clips by the global norm.",
        "clip_grad_norm_ clip_grad_norm clip_gradients gradient_clipping gradient_clip_val"
        " max_grad_norm clip_grad max_norm clip clip_norm grad_clip",
    ),
    (
        "Write with engine.full_gradients(): before engine.step(); param.grad is whole there.",
        "clip_grad_value_ clip_grad_value safe_get_full_grad set_reduce_scatter_divide_factor"
        " set_gradient_divide_factor",
    ),
    ("stats = engine.step() has grad_norm.", "get_global_grad_norm grad_norm global_grad_norm"),
    (
        "stats = engine.step() has skipped.",
        "optimizer_step_was_skipped was_step_applied skipped_steps overflow",
    ),
    ("Write engine.steps.", "global_steps global_step get_global_step micro_steps"),
    ("Read optimizer.param_groups, or scheduler.get_last_lr().", "get_lr get_mom"),
    # parameters and checkpoints
    (
        "Write with engine.full_parameters(): inside it the parameters are whole.",
        "GatheredParameters summon_full_params safe_get_full_fp32_param full_tensor"
        " zero_gather_16bit_weights_on_model_save",
    ),
    (
        "Write engine.model_state_dict() on all workers: it is whole on rank 0 and empty on the "
        "others. engine.save(folder) writes a checkpoint.",
        "state_dict get_state_dict get_model_state_dict module_state_dict state_dict_type"
        " consolidated_16bit_state_dict full_state_dict set_state_dict_type",
    ),
    (
        "Write engine.load(path) on all workers.",
        "load_state_dict set_model_state_dict"
        " set_state_dict load_raw load_checkpoint_in_model load_model",
    ),
    (
        "Write engine.optimizer_state_dict() on all workers.",
        "optim_state_dict full_optim_state_dict"
        " sharded_optim_state_dict consolidate_state_dict get_optimizer_state_dict",
    ),
    (
        "Write engine.load_optimizer_state_dict(state) on all workers.",
        "optim_state_dict_to_load"
        " set_optimizer_state_dict scatter_full_optim_state_dict shard_full_optim_state_dict"
        " rekey_optim_state_dict",
    ),
    ("Write engine.save(folder) on all workers.", "save_checkpoint save_state save checkpoint"),
    ("Write engine.resume(folder) on all workers.", "load_checkpoint load_state load resume"),
    (
        'Write engine.export("model.safetensors") on all workers.',
        "save_model save_16bit_model save_fp16_model save_pretrained export",
    ),
    ("Write engine.track(name=object).", "register_for_checkpointing client_state"),
    ("Write engine.close().", "free_memory clear"),
    (
        "Write ema_decay=0.999 (flag --ema-decay) and with engine.ema():",
        "AveragedModel update_parameters ema",
    ),
    (
        "--timeline FILE records where time goes; shardwise scale measures steps.",
        "profile wall_clock_breakdown flops_profiler ProfileKwargs",
    ),
    (
        "Use the tracker's own library on rank 0: if world.is_main: ...",
        "log log_with init_trackers get_tracker log_dict logging_dir loggers",
    ),
)

_HINTS = {name: sentence for sentence, names in _TABLE for name in names.split()}
_HINTS_IN_LOWER_CASE = {name.lower(): sentence for name, sentence in _HINTS.items()} | _HINTS


def hint(name: str) -> str | None:
    """Return a sentence that says what to write instead of another library's `name`, or None.

    The hint for a flag such as `--zero-stage` is the same as for `zero_stage`.
    """
    name = name.lstrip("-").replace("-", "_")
    return _HINTS.get(name) or _HINTS_IN_LOWER_CASE.get(name.lower())


class HintsAtAttributes:
    """A base class that adds a hint to an AttributeError for another library's attribute name."""

    if not TYPE_CHECKING:  # with this method, a type checker would accept every attribute

        def __getattr__(self, name: str) -> Any:
            try:
                # This raises the usual error, or the error of a property that failed.
                return object.__getattribute__(self, name)
            except AttributeError as error:
                if error.name != name or not (sentence := hint(name)):
                    raise
                raise AttributeError(f"{error}. {sentence}", name=name, obj=self) from None
