"""Systems to run the check on: this machine alone, and a Slurm, such as the one that
`launch/local-slurm start` makes. Copy it and change names, options and modules.
"""

ENVIRONMENT = "hpcfed"
LOCAL = {
    "name": "local",
    "descr": "this machine, without a scheduler",
    "hostnames": [".*"],
    "partitions": [
        {
            "name": "default",
            "scheduler": "local",
            "launcher": "local",
            "environs": [ENVIRONMENT],
            # Studies that share their cores measure each other.
            "max_jobs": 1,
        }
    ],
}
SLURM = {
    "name": "slurm",
    "descr": "a cluster with Slurm",
    "hostnames": [".*"],
    "partitions": [
        {
            "name": "default",
            # "slurm" where sacct works; squeue needs no accounting.
            "scheduler": "squeue",
            "launcher": "srun",
            # For example "--partition=gpu" and "--gpus-per-task=1".
            "access": [],
            # For example [["MPI", "pmi2"]], where srun --mpi=list has no pmix.
            "env_vars": [],
            "environs": [ENVIRONMENT],
            "max_jobs": 1,
        }
    ],
}
site_configuration = {
    "systems": [LOCAL, SLURM],
    # Nothing is compiled: hpcfed is in the Python that the check is given.
    "environments": [{"name": ENVIRONMENT}],
}
