"""Programs whose results changed after jax 0.4.13, each with a twin that gives the same result then and today.

`--check` names the lines that end in `# changed`, and no line of a twin. record_silent.py records what each gives.
"""

from typing import NamedTuple


class Pair(NamedTuple):
    changed: str
    same: str


IMPORTS = "import jax\nimport jax.numpy as jnp\nimport numpy as np\n"
OLD_DRAWS = 'jax.config.update("jax_threefry_partitionable", False)\nkey = jax.random.PRNGKey(0)\n'
HALF = "jnp.full((70_000,), 2.0, dtype=jnp.float16)"
RBG = 'jax.config.update("jax_default_prng_impl", "rbg")\n' + OLD_DRAWS
STEPS = """
import optax
parameters, gradients = jnp.array([1.0, -2.0]), [jnp.array([0.1, -0.2]), jnp.array([-0.4, 0.3])]
state = transform.init(parameters)
for gradient in gradients:
    updates, state = transform.update(gradient, state, parameters)
    parameters = parameters + updates
result = parameters
"""
SHARDED = """
from jax.experimental.shard_map import shard_map
from jax.sharding import Mesh, PartitionSpec as P
mesh, x = Mesh(np.array(jax.devices()[:2]), ("x",)), jnp.arange(1.0, 3.0)
"""
INIT = "import haiku as hk\nf = hk.transform(lambda x: hk.Linear(2{})(x))\n"


def steps(transform: str) -> str:
    return f"import optax\n{OLD_DRAWS}transform = {transform}\n{STEPS}"


PROGRAMS = {
    "uniform": Pair(
        "result = jax.random.uniform(jax.random.PRNGKey(0), (3,))  # changed",
        "result = jax.random.fold_in(jax.random.PRNGKey(0), 3)",
    ),
    "split": Pair(
        "from jax.random import PRNGKey, split\nresult = split(PRNGKey(0))  # changed",
        'jax.config.update("jax_threefry_partitionable", False)\nresult = jax.random.split(jax.random.PRNGKey(0))',
    ),
    "haiku_sequence": Pair(
        "import haiku as hk\nresult = next(hk.PRNGSequence(0))  # changed",
        "import haiku as hk\nresult = jnp.float32(hk.LayerNorm is not None)",
    ),
    "haiku_init": Pair(
        f"{INIT.format('')}result = f.init(jax.random.PRNGKey(0), jnp.ones((1, 2)))  # changed",
        f"{INIT.format(', w_init=jnp.ones')}w = dict(linear=dict(w=jnp.eye(2), b=jnp.ones(2)))\n"
        "result = f.apply(w, None, jnp.ones((1, 2)))",
    ),
    "gamma_below_one": Pair(
        f"{OLD_DRAWS}result = jax.random.gamma(key, 0.5, (3,))  # changed",
        f"{OLD_DRAWS}result = jax.random.gamma(key, 2.0, (3,))",
    ),
    "small_randint": Pair(
        f"{OLD_DRAWS}result = jax.random.randint(key, (8,), 0, 100, dtype=jnp.uint8)  # changed",
        f"{OLD_DRAWS}result = jax.random.randint(key, (8,), 0, 100).astype(jnp.uint8)",
    ),
    "rbg_vmap": Pair(
        f"{RBG}result = jax.vmap(jax.random.uniform)(jax.random.split(key, 3))  # changed",
        f"{RBG}result = jax.lax.map(jax.random.uniform, jax.random.split(key, 3))",
    ),
    "floor": Pair(
        "counts = jnp.array([200], dtype=jnp.uint8)\nresult = jnp.floor(counts) + jnp.uint8(100)  # changed",
        "counts = jnp.array([200.5])\nresult = jnp.floor(counts) + jnp.uint8(100)",
    ),
    "unique_inverse": Pair(
        "result = jnp.unique(jnp.array([[1, 2], [2, 3]]), return_inverse=True)[1]  # changed",
        "result = jnp.unique(jnp.array([[1, 2], [2, 3]]).ravel(), return_inverse=True)[1]",
    ),
    "sign": Pair(
        "result = jnp.sign(jnp.array([3 + 4j]))  # changed",
        "result = jnp.sign(jnp.array([3 + 4j]).real)",
    ),
    "logsumexp_sign": Pair(
        "from jax.scipy.special import logsumexp\n"
        "result = logsumexp(jnp.array([1 + 2j, 3]), None, None, False, True)[1]  # changed",
        "from jax.scipy.special import logsumexp\nresult = logsumexp(jnp.array([1.0, 3.0]), return_sign=True)[1]",
    ),
    "geomspace": Pair(
        "result = jnp.geomspace(-1 + 0j, 1j, 4)  # changed",
        "result = jnp.geomspace(1.0, 8.0, 4)",
    ),
    "astype_bool": Pair(
        "result = jnp.array([1j, 0, 1]).astype(bool)  # changed",
        "result = jnp.array([1.5, 0, 1]).astype(bool)",
    ),
    "solve": Pair(
        "a = jnp.array([[[2.0, 0.0], [0.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]]])\nb = jnp.array([[1.0, 2.0], [3.0, 4.0]])\n"
        "result = jnp.linalg.solve(a, b)  # changed",
        "a, b = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.ones(2)\nresult = jnp.linalg.solve(a, b)",
    ),
    "toeplitz": Pair(
        "from jax.scipy.linalg import toeplitz\nresult = toeplitz(jnp.array([[1.0, 2.0], [3.0, 4.0]]))  # changed",
        "from jax.scipy.linalg import toeplitz\nresult = toeplitz(jnp.array([1.0, 2.0]))",
    ),
    "gamma_function": Pair(
        "from jax.scipy.special import gamma\nresult = gamma(jnp.array([-1.0, -2.0]))  # changed",
        "from jax.scipy.special import gamma\nresult = gamma(jnp.array([1.5, 2.0]))",
    ),
    "rankdata": Pair(
        'from jax.scipy.stats import rankdata\nresult = rankdata(jnp.array([3.0, 1.0]), method="min")  # changed',
        "from jax.scipy.stats import rankdata\nresult = rankdata(jnp.array([3.0, 1.0]))",
    ),
    "isscalar": Pair(
        'result = jnp.isscalar(jnp.array(1.5, "float32"))  # changed',
        "result = jnp.isscalar(1.5)",
    ),
    "dctn": Pair(
        "from jax.scipy.fft import dctn\nresult = dctn(jnp.arange(12.0).reshape(3, 4), s=(2,))  # changed",
        "from jax.scipy.fft import dctn\nresult = dctn(jnp.arange(12.0).reshape(3, 4))",
    ),
    "pmap_shard": Pair(
        "double = jax.pmap(lambda x: x * 2)\ny = double(jnp.ones((1, 3)))\nresult = y.addressable_data(0)  # changed",
        "double = jax.jit(lambda x: x * 2)\ny = double(jnp.ones((1, 3)))\nresult = y.addressable_data(0)",
    ),
    "pmap_index": Pair(
        "@jax.pmap\ndef double(x):\n    return x * 2\ny = double(jnp.ones((4, 3)))\n"
        "result = len(y[0].devices())  # changed",
        "@jax.jit\ndef double(x):\n    return x * 2\ny = double(jnp.ones((4, 3)))\nresult = len(y[0].devices())",
    ),
    "partition_spec": Pair(
        'from jax.sharding import PartitionSpec as P\nresult = P("x", None) == ("x", None)  # changed',
        'from jax.sharding import PartitionSpec as P\nresult = P("x", None) == P("x", None)',
    ),
    "ldexp_gradient": Pair(
        "def f(x): return jnp.ldexp(x, 3)  # changed\nresult = jax.value_and_grad(f)(1.5)",
        "def f(x): return jnp.ldexp(x, 3)\nresult = f(1.5) + jax.grad(lambda x: x * jnp.exp2(3))(1.5)",
    ),
    "trace_unsigned": Pair(
        'x = jnp.full((3, 3), 200, "uint8")\nresult = jnp.trace(x)  # changed',
        'x = jnp.full((3, 3), 20, "int8")\nresult = jnp.trace(x)',
    ),
    "trace_booleans": Pair(
        "result = (jnp.eye(3) == 1).trace()  # changed",
        "result = (jnp.eye(3) == 1).astype(jnp.int32).trace()",
    ),
    "check_rep_psum": Pair(
        f"{SHARDED}def f(w, x):\n    return jax.grad(lambda w: jax.lax.psum(jnp.sum(w * x), 'x'))(w)\n"
        "result = shard_map(f, mesh, (P('x'), P('x')), P('x'))(x, x)  # changed",
        f"{SHARDED}def f(w, x):\n    return jax.grad(lambda w: jax.lax.psum(jnp.sum(w * x), 'x'))(w)\n"
        "result = shard_map(f, mesh, (P('x'), P('x')), P('x'), check_rep=False)(x, x)",
    ),
    "check_rep_mean": Pair(
        f"{SHARDED}from functools import partial\ndef loss(w, x): return jnp.sum(w * x)\n"
        "@partial(shard_map, mesh=mesh, in_specs=(P(), P('x')), out_specs=P())  # changed\n"
        "def f(w, x):\n    return jax.lax.pmean(jax.grad(loss)(w, x), 'x')\nresult = f(jnp.ones(1), x)",
        f"{SHARDED}from functools import partial\ndef loss(w, x): return jax.lax.pmean(jnp.sum(w * x), 'x')\n"
        "f = partial(shard_map, mesh=mesh, in_specs=(P(), P('x')), out_specs=P())(loss)\n"
        "result = jax.grad(f)(jnp.ones(1), x)",
    ),
    "view": Pair(
        "result = jnp.arange(3).view(None)  # changed",
        "result = jnp.arange(3).view(jnp.float32)",
    ),
    "callback_type": Pair(
        "def f(x): return np.float32(isinstance(x, np.ndarray))\n"
        'result = jax.pure_callback(f, jax.ShapeDtypeStruct((), "float32"), jnp.float32(1))  # changed',
        "def f(x): return np.float32(np.asarray(x) * 2)\n"
        'result = jax.pure_callback(f, jax.ShapeDtypeStruct((), "float32"), jnp.float32(1))',
    ),
    "half_mean": Pair(
        f"result = jnp.mean({HALF})  # changed",
        f"x = {HALF}\nresult = jnp.sum(x, dtype=x.dtype) / x.size",
    ),
    "adabelief": Pair(steps("optax.adabelief(0.1)  # changed"), steps("optax.adam(0.1)")),
    "scale_by_belief": Pair(steps("optax.scale_by_belief()  # changed"), steps("optax.scale_by_adam()")),
    "add_noise": Pair(steps("optax.add_noise(0.1, 0.9, 0)  # changed"), steps("optax.adamw(0.1)")),
    "noisy_sgd": Pair(steps("optax.noisy_sgd(0.1)  # changed"), steps("optax.sgd(0.1, momentum=0.9)")),
    "optimistic": Pair(
        steps("optax.optimistic_gradient_descent(0.1)  # changed"), steps("optax.rmsprop(0.1, momentum=0.9)")
    ),
    "scale_by_optimistic": Pair(
        steps("optax.scale_by_optimistic_gradient()  # changed"), steps("optax.scale_by_rms()")
    ),
    # XLA fills the array with zeros on CPU devices to this day: only the program says that it need not.
    "empty": Pair(
        "made = str(jax.make_jaxpr(lambda: jnp.empty((4,)))())  # changed\nresult = 'broadcast_in_dim' in made",
        "made = str(jax.make_jaxpr(lambda: jnp.empty((4, 0)))())\nresult = jnp.empty((0, 3))",
    ),
}  # fmt: skip
