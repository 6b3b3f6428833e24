"""The variables of real launchers, for the second of four ranks, two on each of two hosts.

Each table names its source: the launcher's own source or documentation, or the output of `env` in
a rank that the launcher started. Variables that do not describe ranks or the run are left out.
"""

# mpirun of Open MPI 5.0.11, on one host with two ranks; `env` in a rank
OPENMPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_num_procs": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-6322@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI41": "prterun-vm-6322@0.0;tcp4://127.0.0.1:48289",
    "PRTE_LAUNCHED": "1",
}

# prterun of the same; `env` in a rank. Nothing says of how many it is.
PRTERUN = {
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-6375@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI41": "prterun-vm-6375@0.0;tcp4://127.0.0.1:38495",
    "PRTE_LAUNCHED": "1",
}

# the same, and what its server answers
PRTERUN_ASKED = PRTERUN | {"PMIX_JOB_SIZE": "4", "PMIX_LOCAL_RANK": "1", "PMIX_LOCAL_SIZE": "2"}

# mpiexec.hydra of Intel MPI 2021.19, on one host with two ranks; `env` in a rank
INTEL_MPI = {
    "HYDRA_BSTRAP_LAUNCHER": "ssh",
    "I_MPI_HYDRA_UUID": "9d260000-7c26-e807-8fb4-050000430af0",
    "I_MPI_PIN_INFO": "1",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "9",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}

# mpiexec -pmi-port of MPICH 5.0.2; `env` in a rank
HYDRA_PMI_PORT = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_HOSTNAME": "vm",
    "PMI_ID": "1",
    "PMI_PORT": "vm:38331",
}

# mpiexec.gforker of MPICH 5.0.2, `env` in a rank; Hydra before MPI_LOCALRANKID sets the same
GFORKER = {
    "MPI_APPNUM": "0",
    "MPI_UNIVERSE_SIZE": "-1",
    "PMI_DEBUG": "0",
    "PMI_FD": "12",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}

# mpirun_rsh of MVAPICH2: setup_local_environment() in mpispawn.c
MVAPICH_2 = {
    "MPIRUN_ID": "21874",
    "MPIRUN_NPROCS": "4",
    "MPISPAWN_MPIRUN_HOST": "node01",
    "MPISPAWN_MPIRUN_ID": "21874",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_NODE_ID": "0",
    "PMI_ID": "1",
    "PMI_PORT": "node01:43210",
}

# MVAPICH 3 and 4, whose names begin with MVP_
MVAPICH_3 = {name.replace("MV2_", "MVP_"): value for name, value in MVAPICH_2.items()}

# mpiexec of PALS, --pmi=cray: HPE's pals.h, "Environment variables available for applications"
PALS = {
    "PALS_APID": "0c1fdf2f-1c9d-4a2e-9d0a-6f2d2f8f1a55",
    "PALS_DEPTH": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "0",
    "PALS_RANKID": "1",
    "PBS_JOBID": "4242.polaris-pbs-01",
    "PBS_NODEFILE": "/var/spool/pbs/aux/4242.polaris-pbs-01",
    "PMI_CONTROL_PORT": "11998,11999",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "PMI_UNIVERSE_SIZE": "4",
}

# the same with --pmi=pmix, as on Aurora: nothing says of how many ranks
PALS_PMIX = {
    **{name: value for name, value in PALS.items() if not name.startswith("PMI_")},
    "PMIX_NAMESPACE": "0c1fdf2f-1c9d-4a2e-9d0a-6f2d2f8f1a55",
    "PMIX_RANK": "1",
}

# the same, and what its server answers
PALS_PMIX_ASKED = PALS_PMIX | {
    "PMIX_JOB_SIZE": "4",
    "PMIX_LOCAL_RANK": "1",
    "PMIX_LOCAL_SIZE": "2",
}

# srun with Cray's plugin: src/plugins/mpi/cray_shasta/mpi_cray_shasta.c; Perlmutter, LUMI
SHASTA = {
    "PALS_APID": "17.0",
    "PALS_LOCAL_RANKID": "0",
    "PALS_NODEID": "1",
    "PALS_RANKID": "2",
    "PMI_LOCAL_RANK": "0",
    "PMI_LOCAL_SIZE": "1",
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
}

# flux run: shell_setup_environment() in src/shell/shell.c, src/shell/pmi/pmi.c
FLUX = {
    "FLUX_ENCLOSING_ID": "ƒD2e73NP",
    "FLUX_JOB_ID": "ƒD2e73NP",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_SIZE": "4",
    "FLUX_KVS_NAMESPACE": "job-8762756694016",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_TASK_RANK": "1",
    "FLUX_URI": "local:///run/flux/local",
    "PMI_FD": "14",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
}

# the script of flux batch: env_blocklist in src/broker/runat.c takes the rest out
FLUX_BATCH = {"FLUX_ENCLOSING_ID": "ƒD2e73NP", "FLUX_URI": "local:///tmp/flux-a/local-0"}

# jsrun: the four names that IBM's own tests read, and Lightning's LSFEnvironment
JSRUN = {
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "4",
    "LSB_HOSTS": "batch01 node01 node01 node02 node02",
    "LSB_JOBID": "4242",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "3",
    "PMIX_RANK": "1",
}

# blaunch without a list of hosts: one task on each slot; numbers begin at 1 (IBM's page of blaunch)
BLAUNCH = {
    "LSB_DJOB_NUMPROC": "4",
    "LSB_HOSTS": "node01 node01 node02 node02",
    "LSB_JOBID": "4242",
    "LSB_MCPU_HOSTS": "node01 2 node02 2",
    "LSF_PM_TASKID": "2",
}

# a batch script of LSF
LSF_BATCH = {name: value for name, value in BLAUNCH.items() if name != "LSF_PM_TASKID"}

# parallel universe: addEnvVars() in condor_starter.V6.1/parallel_proc.cpp
CONDOR = {
    "BATCH_SYSTEM": "HTCondor",
    "_CONDOR_NPROCS": "4",
    "_CONDOR_PROCNO": "1",
    "_CONDOR_SLOT": "slot1_1",
}

# a batch script of PBS Pro: start_exec.c
PBS_BATCH = {
    "NCPUS": "2",
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "4242.pbs01",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
}

# a batch script of Torque
TORQUE_BATCH = PBS_BATCH | {"PBS_NP": "4", "PBS_NUM_PPN": "2", "PBS_VNODENUM": "0"}

# a task of pbsdsh on the second host of PBS Pro: momtask_create() in mom_comm.c
PBSDSH = PBS_BATCH | {"PBS_NODENUM": "1", "PBS_TASKNUM": "40000001"}

# a batch script of Grid Engine 8.1.9, and what qrsh -inherit starts on another host; `env` in both
GRID_ENGINE_BATCH = {
    "JOB_ID": "1",
    "JOB_NAME": "job.sh",
    "NHOSTS": "2",
    "NSLOTS": "4",
    "PE": "shardwise",
    "SGE_ROOT": "/opt/sge",
    "SGE_TASK_ID": "undefined",
}
PETASK = GRID_ENGINE_BATCH | {"JOB_NAME": "petask", "NHOSTS": "1", "NSLOTS": "2"}
GRID_ENGINE_ARRAY = GRID_ENGINE_BATCH | {"NSLOTS": "1", "SGE_TASK_ID": "2", "SGE_TASK_LAST": "8"}

# a batch script of OAR: sources/core/common-libs/lib/OAR/Tools.pm
OAR_BATCH = {
    "OAR_ARRAY_INDEX": "1",
    "OAR_JOB_ID": "4924",
    "OAR_NODEFILE": "/var/lib/oar/4924",
}

# a batch script of Cobalt on ThetaGPU
COBALT_BATCH = {
    "COBALT_JOBID": "550270",
    "COBALT_JOBSIZE": "2",
    "COBALT_NODEFILE": "/var/tmp/cobalt.550270",
}

# aprun of Cray's ALPS: a rank only, as libfabric's tests of gni read it
ALPS = {"ALPS_APP_DEPTH": "1", "ALPS_APP_ID": "3588096", "ALPS_APP_PE": "1", "PMI_NO_FORK": "1"}

# sagemaker-training-toolkit: ENVIRONMENT_VARIABLES.md
SAGEMAKER = {
    "SM_CURRENT_HOST": "algo-2",
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_NUM_GPUS": "2",
}

# SkyPilot: docs/source/running-jobs/environment-variables.rst
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2023-07-06-21-18-31-563597_myclus_1",
}

# a worker of Kubeflow's PyTorchJob with one process: pkg/controller.v1/pytorch/envvar.go
PYTORCH_JOB = {
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "RANK": "1",
    "WORLD_SIZE": "2",
}

# Kubeflow's Trainer, in a pod: EnforceMLPolicy() in plugins/torch/torch.go
TRAIN_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
}

# an Indexed Job (kubernetes.io: indexed-parallel-processing-static), and with a user's variables
INDEXED_JOB = {"HOSTNAME": "train-1", "JOB_COMPLETION_INDEX": "1"}
INDEXED_JOB_OF_TWO = INDEXED_JOB | {"MASTER_ADDR": "train-0.train", "WORLD_SIZE": "2"}

# a child of a multi-node parallel job: AWS Batch's page of its environment variables
AWS_BATCH = {
    "AWS_BATCH_JOB_ID": "a1b2#1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.4",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_NUM_NODES": "2",
}

# Azure ML, distribution PyTorch, two processes on each node: its guide of distributed training
AZURE_ML = {
    "AZUREML_NODE_COUNT": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "NODE_RANK": "0",
    "RANK": "1",
    "WORLD_SIZE": "4",
}

# DeepSpeed's launcher: deepspeed/launcher/launch.py
DEEPSPEED = {
    "CROSS_RANK": "0",
    "CROSS_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "4",
}

# a node of Lightning's general purpose cluster: its page cluster_intermediate_1
LIGHTNING_NODE = {
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "29500",
    "NODE_RANK": "1",
    "WORLD_SIZE": "4",
}

# TonY: PyTorchRuntime.java
TONY = {"INIT_METHOD": "tcp://h:1", "RANK": "1", "TASK_INDEX": "1", "WORLD": "4"}

# Determined on Kubernetes: harness/determined/_info.py
DETERMINED = {"DET_KUBERNETES_JOB_PARALLELISM": "2", "DET_SLOT_IDS": "[0,1]"}

# Vertex AI and others with TensorFlow's variable
TF_CONFIG = {
    "TF_CONFIG": '{"cluster":{"chief":["h0:2222"],"worker":["h1:2222"]},'
    '"task":{"type":"worker","index":0}}'
}

# GNU parallel: independent jobs
GNU_PARALLEL = {"PARALLEL_JOBSLOT": "1", "PARALLEL_PID": "4711", "PARALLEL_SEQ": "3"}
