"""`shardwise plan`: predicts memory, time and cost of a script's placements before they are rented.

- flags.py, plan_command.py, plans.py
                 the command: its flags; what it prints; what a plan is, and how it is made
- search.py, meshes.py
                 placements that fit, the fastest first; what would help the others
- observe.py     runs a script up to one step, with two batch sizes
- observer.py, observed_engine.py, observation.py, engine_parts.py, step_recorder.py
                 in that process: the engine without states, and what it records
- tensor_part.py, fake_operators.py
                 the part of a tensor-parallel rank; shapes of what fake tensors refuse
- layout.py      bytes of the states on each rank, to the byte
- memory.py      memory through a step on a device
- stage_records.py, stage_memory.py
                 what a pipeline stage runs, and the micro-batches in flight on a rank
- page.py, memory_plot.py, time_plots.py
                 the page: memory over the step, its time, cost
- hf_model.py    trains a model of transformers by its configuration
- record.py      what was observed of one step, the seam between memory and time
- choice.py      a placement of a training on a cluster, and who says how long its step takes
- sourced_toml.py  TOML in which every value names its source
- catalogue.py   devices and links with their figures, each with its source: hardware/*.toml
- cluster.py     a cluster as it is written, such as 4x8xH100
- clock.py       the step of an observed script, in seconds by kind
- operations.py, collectives.py, overlap.py, pipeline_time.py
                 what operations, collectives, both beside each other, and schedules take
- parallelism.py, stages.py
                 the axes of a mesh; the step from the work of each pipeline stage
- transformer.py, transformer_clock.py
                 a transformer by formula, for published rows and for configurations
- cost.py        days, dollars and kWh
- calibrate.py, calibration_worker.py
                 measure this machine, for --on here
"""
