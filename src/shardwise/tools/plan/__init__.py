"""`shardwise plan`: predicts the memory, time and cost of a script under each placement.

How a plan is made:

    script -> observe.py -> record.py -> memory.py, clock.py -> search.py -> the printed command

- flags.py, plan_command.py, plans.py
                 the command's flags, its output, and how it builds a plan
- observe.py     runs the script up to its first step, with two batch sizes
- observer.py, observed_engine.py, observation.py, engine_parts.py, step_recorder.py
                 run in that process: an engine without states, which records the step
- fake_operators.py  output shapes for operators that fake tensors do not support
- record.py      the recorded step, the basis for predicting memory and time
- choice.py      a candidate: a placement and mesh, and the estimated time of its step
- layout.py      the exact size of the states on each rank
- stage_records.py  the part of a record that a pipeline stage runs
- memory.py      a device's memory use over a step
- clock.py, stages.py  the predicted step time, by kind of work and by pipeline stage
- operations.py, collectives.py, overlap.py, pipeline_time.py
                 times of operations, collectives, overlapped passes and pipeline schedules
- parallelism.py, meshes.py  the axes of a mesh; the meshes to try
- search.py      candidates that fit, fastest first; hints for candidates that do not fit
- page.py, plots.py  the HTML page, with plots of memory, time and cost
- cost.py        days, dollars and kWh
- catalogue.py, sourced_toml.py  devices and links, each value with its source: hardware/*.toml
- cluster.py     parses a cluster spec such as 4x8xH100
- calibrate.py, calibration_worker.py  measure this machine, for --on here
- hf_model.py    trains a transformers model from its config.json
- transformer.py  closed-form step time of a transformer, compared with published results
"""
