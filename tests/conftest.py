"""Eight CPU devices, strict promotion, no network: set before anything touches a device."""

import jax

from shardformer import mesh

mesh.use_cpu_devices(8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
