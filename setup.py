from setuptools import find_packages, setup

setup(
    name="shardformer",
    version="0.1.0",
    description="Sharded transformer language models in Haiku, under shard_map, on today's JAX",
    package_dir={"": "."},  # an editable install is then a plain path, which no folder of the same name hides
    packages=find_packages(include=["shardformer", "shardformer.*"]),
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10",
        "dm-haiku>=0.0.17",
        "optax>=0.2.8",
        "numpy",
        # The input pipeline and TensorBoard events; imported only where data is read or events are written.
        "tensorflow>=2.21",
        "tensorflow-datasets>=4.9.10",
        "importlib_resources",  # tensorflow-datasets 4.9.10 imports it without declaring it
        "requests",  # asks whether tiny_shakespeare can be downloaded, as tensorflow-datasets would
        "rich",  # progress on a terminal
        "matplotlib",  # curves.png
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda13]"],
        "cuda12": ["jax[cuda12]"],  # for drivers before 580
        # hypothesis: properties where a table of cases would miss; orbax-checkpoint: what `bench checkpoint` compares
        # obstore: the bucket's code on a bucket in memory; tokenizers, zstandard: all kinds of text
        "dev": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "orbax-checkpoint",
            "obstore",
            "tokenizers",
            "zstandard",
        ],
        "text": ["tokenizers", "zstandard"],  # tokenizer=bpe:N and tokenizer.json; .zst files
        "aot": ["libtpu"],  # `plan` compiles for TPUs that are not here
        "eval": ["lm-eval[hf]", "tokenizers"],  # `harness`: its tasks, which import torch and datasets
        "bucket": ["obstore"],  # out=gs://... and s3://...: reads and writes in parts, with conditions
    },
    entry_points={"console_scripts": ["shardformer = shardformer.__main__:main"]},
)
