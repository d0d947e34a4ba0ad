"""A Spack package of hpcfed. Copy it to packages/py-hpcfed/ in a repository of Spack (from
Spack 1.0 on: packages/py_hpcfed/), set `git` to your clone, and: spack install py-hpcfed
"""

from spack.package import depends_on, variant, version

try:  # from Spack 1.0 on
    from spack_repo.builtin.build_systems.python import PythonPackage
except ImportError:
    from spack.package import PythonPackage


class PyHpcfed(PythonPackage):
    """Benchmarks federated learning: each MPI rank hosts a shard of the clients."""

    git = "file:///path/of/clone"
    version("main", branch="main")
    variant("hf", default=False, description="Fine-tune language models")

    depends_on("py-setuptools@77:", type="build")
    depends_on("python@3.11:", type=("build", "run"))
    for needed in (
        "py-torch@2.11:+distributed",
        "py-torchvision",
        "py-numpy",
        "py-scipy",
        "py-h5py@3.10:",
        "py-scikit-learn",
        "py-mpi4py@4:",
        "py-pydantic@2.7:",
        "py-rich",
        "py-deepspeed@0.16:",
        "py-nvidia-ml-py",
        "py-jinja2",
        "py-vl-convert-python@1.7:",
        "py-dp-accounting@0.6:",
        "py-safetensors",
    ):
        depends_on(needed, type=("build", "run"))
    for needed in ("py-datasets", "py-transformers", "py-peft"):
        depends_on(needed, when="+hf", type=("build", "run"))
