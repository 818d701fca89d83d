"""pjit and with_sharding_constraint under their old names: values, layouts, donation, and the mesh around the call."""

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.legacy import installed
from shardformer.legacy.mesh_in_scope import ResourceEnv, mesh, thread_resources
from shardformer.legacy.pjit import AUTO, lax_with_sharding_constraint, pjit, with_sharding_constraint
from shardformer.legacy.pmap import pmap

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def devices(dp: int, mp: int):
    return np.array(jax.devices()).reshape(dp, mp)


@pytest.fixture
def mesh_4x2():
    with mesh(devices(4, 2), ("dp", "mp")) as entered:
        yield entered


def maybe_shard(x, resource):
    """As mesh-transformer-jax has it."""
    try:
        return with_sharding_constraint(x, resource)
    except ValueError as e:
        print(e)
        return x


def lies(array, *spec) -> bool:
    """Returns True if the array is split as a spec on the 4x2 mesh splits it."""
    wanted = NamedSharding(Mesh(devices(4, 2), ("dp", "mp")), P(*spec))
    return array.sharding.is_equivalent_to(wanted, array.ndim)


def test_values_and_layouts(mesh_4x2):
    double = pjit(lambda x, y: (2 * x, x @ y), in_axis_resources=(P("dp"), None), out_axis_resources=(P("dp"), P("mp")))
    twice, product = double(X, X)
    np.testing.assert_array_equal(twice, 2 * X)
    np.testing.assert_array_equal(product, X @ X)
    assert lies(twice, "dp")
    assert lies(product, "mp")
    assert not lies(product, "dp")


def test_none_is_replicated_and_a_spec_covers_a_subtree(mesh_4x2):
    tree = {"a": X, "b": (X, X)}

    def same(tree, x):
        return tree, x

    resources = [{"a": None, "b": P(None, ["mp", "dp"])}, P(("dp", "mp"))]  # a list, and lists in specs, as V2 has them
    out, x = pjit(same, resources, tuple(resources))(tree, X)
    assert lies(out["a"])
    assert lies(out["b"][0], None, ("mp", "dp"))
    assert lies(out["b"][1], None, ("mp", "dp"))
    assert lies(x, ("dp", "mp"))


def test_list_of_specs_is_arguments_or_a_list_of_results(mesh_4x2):
    specs = [P("dp"), None]
    out = pjit(lambda x, y: [x, y], specs, specs)(X, X)
    assert isinstance(out, list)
    assert lies(out[0], "dp")
    assert lies(out[1])
    with pytest.raises(ValueError, match="pytree structure"):
        pjit(lambda x, y: (x, y), specs, specs)(X, X)


def test_the_mesh_is_the_one_around_the_call():
    seen = []

    def body(x):
        seen.append(thread_resources.env.shape["mp"])
        return with_sharding_constraint(x * seen[-1], P("dp", "mp"))

    scale = pjit(body, P("dp"), P("dp", "mp"))
    for mp in (2, 4, 2):
        with mesh(devices(8 // mp, mp), ("dp", "mp")) as entered:
            out = scale(X)
        np.testing.assert_array_equal(out, mp * X)
        assert out.sharding == NamedSharding(entered, P("dp", "mp"))
    assert seen == [2, 4]  # compiled once for each


@pytest.fixture
def assign():
    """Assigns the mesh as old scripts do, which jax does not hear of."""
    before = thread_resources.env

    def assigned(mesh):
        thread_resources.env = ResourceEnv(mesh, ())

    yield assigned
    thread_resources.env = before


def test_a_function_is_traced_once_for_all_its_pjits(mesh_4x2, collect_young):
    traced = []

    def body(x, *, scale=2):
        traced.append(scale)
        return scale * x

    for _ in range(3):  # as programs do in each step
        out = pjit(body, P("dp"), P("dp"))(X)
    assert traced == [2]
    np.testing.assert_array_equal(out, 2 * X)
    gone = weakref.ref(body)
    del body
    collect_young()
    assert gone() is None


def test_a_recursive_function_is_freed(mesh_4x2, collect_young):
    def run():
        def power(x, n=3):
            return x if n == 1 else x * power(x, n - 1)

        np.testing.assert_array_equal(pjit(power, P("dp"), P("dp"))(X), X**3)
        return weakref.ref(power)

    gone = run()
    collect_young()
    assert gone() is None


def test_a_wrapper_is_not_taken_for_its_function(mesh_4x2):
    def double(x):
        return 2 * x

    np.testing.assert_array_equal(pjit(double, P("dp"), P("dp"))(X), 2 * X)

    @functools.wraps(double)  # which copies its attributes
    def twice(x):
        return double(double(x))

    np.testing.assert_array_equal(pjit(twice, P("dp"), P("dp"))(X), 4 * X)


def test_arguments_without_a_layout_go_to_the_mesh(mesh_4x2):
    double = pjit(lambda x, n: (2 * x, n), static_argnums=1)
    out, one = double(X, 1)
    assert lies(out)
    assert int(one) == 1
    assert len(pjit(jnp.sin)(jnp.asarray(X)).devices()) == 8
    committed = jax.device_put(X, jax.devices()[3])
    assert double(committed, 1)[0].devices() == {jax.devices()[3]}
    thread_resources.env = ResourceEnv()
    assert len(double(jnp.asarray(X), 1)[0].devices()) == 1


def test_results_of_a_pmap_go_to_the_mesh():
    pmapped, on_three = pmap(lambda x: x)(jnp.arange(8)), jax.device_put(jnp.arange(4), jax.devices()[3])
    with Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y")) as mesh:
        results = pjit(lambda x, y: (2 * x, y))(pmapped, jnp.arange(4))
        assert [result.devices() for result in results] == [set(mesh.devices.flat)] * 2
        assert results[0].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert pjit(lambda x: x)(on_three).devices() == {jax.devices()[3]}


def test_an_axis_twice_is_a_value_error(mesh_4x2):
    for spec in (P("dp", "dp"), P("dp", ("mp", "dp"))):
        for use in (pjit(lambda x: x, spec), lambda x, spec=spec: lax_with_sharding_constraint(x, spec)):
            with pytest.raises(ValueError, match=r"which has a mesh axis twice"):
                use(X)


def test_an_assigned_mesh(assign):
    move = pjit(lambda x: with_sharding_constraint(x * thread_resources.env.shape["mp"], P(None, "mp")), P("dp"))
    for mp in (2, 4, 2):
        assigned = Mesh(devices(8 // mp, mp), ("dp", "mp"))
        assign(assigned)
        out = move(X)
        np.testing.assert_array_equal(out, mp * X)
        assert out.sharding.is_equivalent_to(NamedSharding(assigned, P(None, "mp")), 2)


def test_an_argument_committed_elsewhere_is_moved(mesh_4x2):
    elsewhere = jax.device_put(X, NamedSharding(Mesh(devices(2, 4), ("dp", "mp")), P("mp", "dp")))

    def add(x, y):
        return x + y

    out = pjit(add, (P("dp", "mp"), P("dp")), P("dp"))(elsewhere, jax.device_put(X, jax.devices()[3]))
    np.testing.assert_array_equal(out, 2 * X)
    spec = NamedSharding(mesh_4x2, P("dp", "mp"))
    with pytest.raises(ValueError, match="sharding"):
        jax.jit(add, in_shardings=(spec, spec))(elsewhere, X)


def test_donation_takes_whole_trees_and_nothing_else(mesh_4x2):
    step = pjit(
        lambda state, x: jax.tree.map(lambda leaf: leaf + x, state), (P("dp"), P("dp")), P("dp"), donate_argnums=(0,)
    )
    place = NamedSharding(mesh_4x2, P("dp"))
    state, x = jax.device_put(({"a": X, "b": X}, X), place)
    out = step(state, x)
    assert state["a"].is_deleted()
    assert state["b"].is_deleted()
    assert not x.is_deleted()
    np.testing.assert_array_equal(out["b"], 2 * X)


@pytest.mark.parametrize("static", [1, (1,), (-2,)])
def test_static_arguments(mesh_4x2, static):
    power = pjit(lambda x, n, y: x**n + y if n > 1 else y, (P("dp"), P("mp")), P("dp"), static_argnums=static)
    np.testing.assert_array_equal(power(X, 2, jax.device_put(X, jax.devices()[1])), X**2 + X)
    np.testing.assert_array_equal(power(X, 1, X), X)


def test_static_arguments_left_at_their_defaults(mesh_4x2):
    scaled = pjit(lambda x, y, n=3, m=2: x * n + y * m, (P("dp"), P("mp")), static_argnums=(2, np.int64(3)))
    for rest, n, m in (((), 3, 2), ((4,), 4, 2), ((4, 5), 4, 5)):
        elsewhere = jax.device_put(X, jax.devices()[1])
        np.testing.assert_array_equal(scaled(elsewhere, elsewhere, *rest), (n + m) * X)
    np.testing.assert_array_equal(pjit(lambda x, n: x * n, P("dp"), static_argnums=np.int64(1))(X, 2), 2 * X)
    with pytest.raises(TypeError, match="float"):
        pjit(lambda x, n: x, static_argnums=1.0)


@pytest.mark.parametrize("caught", [ValueError, RuntimeError])  # the second since jax 0.2.21
def test_outside_of_a_mesh(caught):
    message = r"got P(artitionSpec)?\('dp',?\) outside of a mesh; call it inside `with Mesh"
    for constrain in (with_sharding_constraint, lax_with_sharding_constraint):
        with pytest.raises(caught, match="with_sharding_constraint " + message):
            constrain(X, P("dp"))
    with pytest.raises(caught, match="pjit's in_axis_resources " + message):
        pjit(lambda x: x, P("dp"), P("dp"))(X)
    np.testing.assert_array_equal(jax.jit(lambda x: maybe_shard(x, P("dp")) + 1)(X), X + 1)
    np.testing.assert_array_equal(pjit(lambda x: x + 1)(X), X + 1)  # nothing was asked for
    with pytest.warns(DeprecationWarning, match="device argument"):
        assert pjit(lambda x: x + 1, None, None, device=jax.devices()[3])(X).device is jax.devices()[3]


@pytest.mark.parametrize("nothing", [None, (None,), [None]])
def test_none_outside_of_a_mesh_asks_for_nothing(nothing):
    add = pjit(lambda x: x + 1, nothing, None)
    np.testing.assert_array_equal(add(X), X + 1)
    x = jax.device_put(X, NamedSharding(Mesh(devices(4, 2), ("dp", "mp")), P("dp")))
    assert lies(add(x), "dp")
    with mesh(devices(4, 2), ("dp", "mp")):
        assert lies(add(x))
    with pytest.raises(ValueError, match="outside of a mesh"):
        pjit(lambda x: x, P(), None)(X)  # though in a mesh it is the same as None


def test_maybe_shard_inside_shards(mesh_4x2, capsys):
    out = pjit(lambda x: maybe_shard(2 * x, P(None, ("dp", "mp"))))(X)
    assert lies(out, None, ("dp", "mp"))
    trees = with_sharding_constraint({"a": X, "b": (X,)}, {"a": P("mp"), "b": None})
    assert lies(trees["a"], "mp")
    assert lies(trees["b"][0])
    assert capsys.readouterr().out == ""
    maybe_shard(X, P("nowhere"))
    assert "nowhere" in capsys.readouterr().out


def test_an_explicit_mesh(assign):
    explicit = Mesh(devices(4, 2), ("dp", "mp"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(X, NamedSharding(explicit, P("dp")))

    def body(x):  # explicit meshes reject it
        return with_sharding_constraint(x @ x.T.reshape(64).reshape(8, 8).T, P("mp"))

    assign(explicit)
    out = pjit(body, P("dp"), P("dp"))(x)
    np.testing.assert_array_equal(out, X @ X)
    assert lies(out, "dp")


def test_constraint_returns_an_array_that_has_the_layout(mesh_4x2):
    x = jax.device_put(X, NamedSharding(mesh_4x2, P("dp")))
    for constrain in (with_sharding_constraint, lax_with_sharding_constraint):
        assert constrain(x, P("dp")) is x
        assert lies(constrain(x, P("mp")), "mp")
    assert lax_with_sharding_constraint({"x": x}, P("dp"))["x"].sharding == x.sharding


def test_mesh_of_other_devices_inside_of_a_pjit(mesh_4x2):
    def nested(inner):
        def body(x):
            with inner:
                return pjit(lambda x: 2 * x, P("dp"), P("dp"))(x)

        return pjit(body, P("dp"), P("dp"))(X)

    np.testing.assert_array_equal(nested(Mesh(devices(2, 4), ("dp", "mp"))), 2 * X)
    with pytest.raises(RuntimeError, match="the physical mesh cannot change inside of a pjit; enter one mesh"):
        nested(Mesh(devices(4, 2)[:2], ("dp", "mp")))
    np.testing.assert_array_equal(pjit(lambda x: x, P("dp"), P("dp"))(X), X)


def test_gradients_and_jit_around_it(mesh_4x2):
    loss = pjit(lambda w, x: jnp.sum(jnp.sin(maybe_shard(x @ w, P("dp", "mp")))), (P(None, "mp"), P("dp")), None)
    expected = jax.grad(lambda w: jnp.sum(jnp.sin(X @ w)))(X)
    np.testing.assert_allclose(jax.grad(loss)(X, X), expected, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X, X), expected, rtol=1e-5, atol=1e-3)
    assert jax.eval_shape(loss, X, X).shape == ()


def test_lower(mesh_4x2):
    double = pjit(lambda x: 2 * x, P("dp"), P("dp"))
    np.testing.assert_array_equal(double.lower(X).compile()(X), 2 * X)
    assert double.__name__ == "<lambda>"


def test_the_later_keywords_go_on(mesh_4x2):
    out = pjit(lambda x, *, y: x + y, out_shardings=P("mp"))(X, y=X)
    np.testing.assert_array_equal(out, 2 * X)
    assert lies(out, "mp")
    split = jax.device_put(X, NamedSharding(mesh_4x2, P("dp")))
    assert lies(pjit(lambda x: x, out_shardings=None)(split))  # replicated in a mesh, as jax 0.4.13 and 0.4.30 give it
    assert lies(pjit(lambda x: x, in_shardings=(None,))(X))
    assert lies(pjit(lambda x: x)(split), "dp")  # nothing was asked for


def test_none_asks_for_nothing_outside_of_a_mesh():
    split = jax.device_put(X, NamedSharding(Mesh(devices(4, 2), ("dp", "mp")), P("dp")))
    assert lies(pjit(lambda x: x, in_shardings=None, out_shardings=None)(split), "dp")


def test_arguments_that_are_static_by_name(mesh_4x2):
    def scaled(factors, x, *, shift):
        return x * len(factors) + len(shift)

    named = pjit(scaled, static_argnames=("factors", "shift"))
    np.testing.assert_array_equal(named("abc", X, shift="d"), 3 * X + 1)
    assert lies(pjit(lambda n, x: x * len(n), in_shardings=P("mp"), static_argnames="n")("abc", X), "mp")
    with pytest.raises(TypeError, match="abstract array"):
        pjit(scaled, static_argnames="shift")("abc", X, shift="d")  # the first text is not static
    assert pjit(len, static_argnums=0)("abc") == 3  # asks no signature
    assert pjit(max, static_argnames="n")((2.0,)) == 2  # has none
    behind = pjit(lambda x, /, n: x * len(n), in_shardings=P("dp"), static_argnames="n")
    np.testing.assert_array_equal(behind(X, "abc"), 3 * X)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "both in_axis_resources and in_shardings; give one of them",
         lambda: pjit(lambda x: x, P("dp"), in_shardings=P("dp"))),
        (TypeError, "takes PartitionSpecs, None, or pytrees of them; got 'dp'",
         lambda: pjit(lambda x: x, "dp", None)),
        (ValueError, "both in_shardings and backend; give one of them",
         lambda: pjit(lambda x: x, P("dp"), backend="cpu")),
        (ValueError, "both out_shardings and device; give one of them",
         lambda: pjit(lambda x: x, out_shardings=P("dp"), device=jax.devices()[0])),
        (ValueError, "both device and backend; give one of them",
         lambda: pjit(lambda x: x, device=jax.devices()[0], backend="cpu")),
        (ValueError, "pjit got device inside of a mesh", lambda: pjit(lambda x: x, device=jax.devices()[0])(X)),
        (ValueError, "nowhere", lambda: pjit(lambda x: x, P("nowhere"), None)(X)),
        (ValueError, "divi", lambda: pjit(lambda x: x, P("dp"), None)(X[:3])),
        (ValueError, "in_axis_resources does not fit the call's 2 arguments",
         lambda: pjit(lambda x, y: x, (P("dp"),), None)(X, X)),
    ],
)  # fmt: skip
def test_wrong_specs(mesh_4x2, error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_it_is_what_old_code_imports(mesh_4x2):
    with installed():
        from jax.experimental.pjit import pjit as imported
        from jax.experimental.pjit import with_sharding_constraint as constrain

        assert imported is pjit
        assert constrain is with_sharding_constraint
    assert not hasattr(jax.experimental.pjit, "with_sharding_constraint")


def test_jit_accepts_auto(mesh_4x2):
    split = NamedSharding(mesh_4x2, P("dp"))
    with pytest.raises(TypeError, match="got AUTO"):
        jax.jit(jnp.add, in_shardings=(split, AUTO(mesh_4x2)))
    with installed():
        add = jax.jit(jnp.add, in_shardings=(split, AUTO(mesh_4x2)), out_shardings=AUTO)
        assert lies(add(X, jax.device_put(X, split)), "dp")
        assert lies(jax.jit(jnp.sin, out_shardings=split)(X), "dp")
