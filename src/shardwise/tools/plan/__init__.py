"""The command `shardwise plan`: predicts memory, time and cost of a script's placements.

The path of a plan:

    script -> observe.py -> record.py -> memory.py, clock.py -> search.py -> the printed command

- flags.py, plan_command.py, plans.py
                 the command: its flags; its output; a plan and how it is made
- observe.py     runs a script up to one step, with two batch sizes
- observer.py, observed_engine.py, observation.py, engine_parts.py, step_recorder.py
                 in that process: the engine without states, and its records
- fake_operators.py  shapes for operators that fake tensors do not support
- record.py      the observed step: the input of memory and of time
- choice.py      a placement of a training on a cluster, and the estimate of its step
- layout.py      bytes of the states on each rank, exactly
- stage_records.py  the part of a record that a pipeline stage runs
- memory.py      memory through a step on a device
- clock.py, stages.py  the step of an observed script, in seconds by kind and stage
- operations.py, collectives.py, overlap.py, pipeline_time.py
                 times of operations, of collectives, of both in parallel, and of schedules
- parallelism.py, meshes.py  the axes of a mesh; the meshes to try
- search.py      placements that fit, the fastest first; hints for the others
- page.py, plots.py  the page: memory over the step, its time, cost
- cost.py        days, dollars and kWh
- catalogue.py, sourced_toml.py  devices and links, each value with its source: hardware/*.toml
- cluster.py     parses a cluster, such as 4x8xH100
- calibrate.py, calibration_worker.py  measure this machine, for --on here
- hf_model.py    trains a transformers model from its configuration
- transformer.py  the time of a transformer by formula, for published rows
"""
