"""The behaviour of xmap beside its values: messages, warnings, what is compiled and what is moved."""

import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardformer.analysis import program_collectives
from shardformer.legacy import Mesh, ResourceEnv, SerialLoop, mesh, serial_loop, thread_resources, xmap
from shardformer.legacy.named_products import einsum, pgather, xeinsum


def devices(*shape):
    return np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)


def double(x):
    return 2 * x


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_the_same_function_and_specs_compile_once():
    traced = []

    def body(x):
        traced.append(x.shape)
        return x

    for _ in range(3):
        xmap(body, ["i", ...], ["i", ...])(ROWS)
    assert traced == [(3,)]
    xmap(body, ["i", ...], ["i", ...])(ROWS.astype(np.int32))
    xmap(body, {1: "i"}, ["i", ...])(ROWS)
    assert traced == [(3,), (3,), (4,)]


@pytest.mark.slow
def test_methods_are_cached_and_die_with_their_function(collect_young):
    class Model:
        def __init__(self):
            self.traced = 0

        def forward(self, x):
            self.traced += 1
            return x

    model = Model()
    for dtype in (np.float32, np.float32, np.int32):
        xmap(model.forward, ["i", ...], ["i", ...])(ROWS.astype(dtype))
    held = xmap(model.forward, ["i", ...], ["i", ...])
    gone = weakref.ref(model)
    del model, held
    jax.clear_caches()
    collect_young()
    assert gone() is None


def test_arrays_in_another_layout_are_moved():
    split = xmap(double, ["i", ...], ["i", ...], axis_resources={"i": "x"})
    elsewhere = jax.device_put(ROWS, jax.devices()[5])
    with Mesh(devices(4, 2), ("x", "y")) as around:
        got = split(elsewhere)
        wanted = jax.sharding.NamedSharding(around, jax.sharding.PartitionSpec("x"))
        assert got.sharding.is_equivalent_to(wanted, 2)
    np.testing.assert_array_equal(got, 2 * ROWS)


def test_an_explicit_mesh_is_as_good_as_any():
    split = xmap(lambda x: lax.psum(x, "i"), ["i", ...], [...], axis_resources={"i": "x"})
    with jax.make_mesh((4,), ("x",)):
        np.testing.assert_array_equal(split(ROWS), ROWS.sum(0))


def test_an_assigned_mesh_holds_until_the_block_around_it_ends():
    env = thread_resources.env
    try:
        thread_resources.env = ResourceEnv(Mesh(devices(4, 2), ("dp", "mp")), ())
        assert dict(thread_resources.env.shape) == {"dp": 4, "mp": 2}
        with mesh(devices(8), ("other",)):
            assert list(thread_resources.env.shape) == ["other"]
            with serial_loop("l", 2):
                assert dict(thread_resources.env.shape) == {"other": 8, "l": 2}
            assert list(thread_resources.env.shape) == ["other"]
        assert list(thread_resources.env.shape) == ["dp", "mp"]
    finally:
        thread_resources.env = env
    assert not thread_resources.env.shape


def test_a_loop_needs_less_memory():
    def body(x):
        return jnp.sort(x[:, None] * x[None], axis=0)[3].sum()

    x = np.ones((16, 64), np.float32)
    whole, turns = (
        xmap(body, ["i", ...], ["i"], axis_resources=resources).lower(x).compile().memory_analysis().temp_size_in_bytes
        for resources in ({}, {"i": SerialLoop(16)})
    )
    assert turns < whole / 8


def test_one_axis_on_two_loops():
    x = np.arange(36, dtype=np.float32).reshape(12, 3)
    loops = {"i": (SerialLoop(2), SerialLoop(3))}
    np.testing.assert_array_equal(xmap(double, ["i", ...], ["i", ...], axis_resources=loops)(x), 2 * x)


def test_a_result_of_a_loop_may_be_empty():
    empty = xmap(lambda x: x[:0], ["i", ...], ["i", ...], axis_resources={"i": SerialLoop(2)})
    assert empty(ROWS).shape == (4, 0)


# The wire ------------------------------------------------------------------------------------------------------------


def block(w_in, w_out, x):
    return lax.psum(jax.nn.gelu(x @ w_in) @ w_out, "shard")


def loss_and_grads(w_in, w_out, x):
    loss, grads = jax.value_and_grad(lambda *w: (block(*w, x) ** 2).sum(), (0, 1))(w_in, w_out)
    return lax.pmean(loss, "batch"), lax.pmean(grads, "batch")


def test_no_more_crosses_the_wire_than_under_shard_map():
    """The partitioner places the collectives of an xmap: as many bytes as if each had been placed by hand."""
    P = jax.sharding.PartitionSpec
    w_in, w_out, x = (np.ones(shape, np.float32) for shape in ((2, 32, 64), (2, 64, 32), (4, 16, 32)))
    with Mesh(devices(4, 2), ("dp", "mp")):
        ours = xmap(
            loss_and_grads,
            (["shard", ...], ["shard", ...], ["batch", ...]),
            ([...], ["shard", ...]),
            axis_resources={"shard": "mp", "batch": "dp"},
        ).lower(w_in, w_out, x)

    def by_hand(w_in, w_out, x):
        loss, grads = loss_and_grads(w_in[0], w_out[0], x[0])
        return loss, jax.tree.map(lambda g: g[None], grads)

    twin = jax.jit(
        jax.shard_map(
            by_hand,
            mesh=Mesh(devices(4, 2), ("batch", "shard")),
            in_specs=(P("shard"), P("shard"), P("batch")),
            out_specs=(P(), P("shard")),
            check_vma=False,
        )
    ).lower(w_in, w_out, x)

    def sent(lowered):
        return sum(c.bytes for c in program_collectives.parse_collectives(lowered.compile().as_text()))

    assert 0 < sent(ours) <= sent(twin)


# What vmap refuses ---------------------------------------------------------------------------------------------------


def pairs(x):
    return lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]])


def test_shard_map_reads_an_omitted_axis_at_index_0():
    resources = {"i": "x"}
    x = np.arange(4, dtype=np.float32)
    with mesh(devices(4, 2), ("x", "y")):
        with pytest.warns(UserWarning, match="index 0"):
            got = xmap(pairs, ["i"], [...], axis_resources=resources)(x)
        assert {float(shard.data) for shard in got.addressable_shards} == {1.0}
        with pytest.raises(
            TypeError, match="is not known to be the same along a named axis that its out_axes spec omits"
        ):
            xmap(pairs, ["i"], [...], axis_resources=resources, strict=True)(x)
        both = xmap(pairs, ["i", "k"], ["i"], axis_resources=resources)
        with pytest.warns(UserWarning, match="index 0"):
            np.testing.assert_array_equal(both(np.stack([x, 10 * x], axis=1)), [1, 1, 5, 5])


def test_loops_hold_inside_of_a_mesh_that_is_entered_after_them():
    with serial_loop("l", 2), mesh(devices(2), ("x",)):
        assert dict(thread_resources.env.shape) == {"x": 2, "l": 2}


def test_what_was_assigned_in_a_block_is_over_with_it():
    first, other = Mesh(devices(4, 2), ("x", "y")), Mesh(devices(2, 4), ("x", "y"))
    with first:
        thread_resources.env = ResourceEnv(other)
        assert dict(thread_resources.env.shape) == {"x": 2, "y": 4}
    with first:
        assert dict(thread_resources.env.shape) == {"x": 4, "y": 2}
        thread_resources.env = ResourceEnv(other)
    assert not thread_resources.env.shape


def test_an_assigned_mesh_is_looked_up_at_every_call():
    inner = xmap(lambda x: lax.psum(x, "i"), ["i"], [...], axis_resources={"i": "x"})
    outer = xmap(lambda x: inner(x), ["j", ...], ["j"])
    before = thread_resources.env
    try:
        thread_resources.env = ResourceEnv(Mesh(devices(4), ("x",)))
        np.testing.assert_array_equal(outer(np.ones((3, 4), np.float32)), [4, 4, 4])
        thread_resources.env = ResourceEnv(Mesh(devices(3), ("x",)))
        with pytest.raises(ValueError, match="not divisible by the 3 parts"):
            outer(np.ones((3, 4), np.float32))
    finally:
        thread_resources.env = before


def test_what_neither_vmap_nor_shard_map_can_do_is_said_in_words():
    inner = xmap(pairs, ["i"], ["i"], axis_resources={"i": "x"})
    outer = xmap(lambda x: lax.psum(inner(x), "j", axis_index_groups=[[0], [1]]), ["j", ...], ["j", ...],
                 axis_resources={"j": "y"})  # fmt: skip
    words = (
        r"jax rejects a part of the xmapped \S+: .* over groups .* one position on each device, .* not within another"
    )
    with mesh(devices(4, 2), ("x", "y")):
        np.testing.assert_array_equal(inner(np.ones(4, np.float32)), [2, 2, 2, 2])
        with pytest.raises(NotImplementedError, match=words):
            outer(np.ones((2, 4), np.float32))
    with pytest.raises(NotImplementedError, match=words):
        xmap(pairs, ["i"], ["i"])(np.ones(4, np.float32))


def test_a_name_that_the_body_itself_lacks_is_no_matter_of_loops():
    with pytest.raises(NameError, match="missing"):
        xmap(lambda x: missing, ["i"], ["i"], axis_resources={"i": SerialLoop(2)})(np.ones(4))  # noqa: F821


def test_a_misspelt_name_is_no_matter_of_loops():
    with pytest.raises(NameError, match=r"unbound axis name: bacth .* are 'i'"):
        xmap(lambda x: lax.psum(x, "bacth"), ["i"], ["i"], axis_resources={"i": SerialLoop(2)})(np.ones(4))


def test_strict_checks_containers_after_a_lenient_call():
    def pair(x):
        return x, x

    one = ["i", ...]
    xmap(pair, one, (one, one), strict=True)(ROWS)
    with pytest.raises((TypeError, ValueError)):
        xmap(pair, one, [one, one], strict=True)(ROWS)


def test_warnings_and_profiles_speak_of_the_caller_s_code():
    def user_step(x):
        return x + 1

    mapped = xmap(user_step, ["i", ...], [...])
    assert "user_step" in mapped.lower(ROWS).as_text()
    with pytest.warns(UserWarning, match="a result of the xmapped user_step varies") as told:
        mapped(ROWS + 1)
    assert {warning.filename for warning in told} == {__file__}


# Arguments that lie elsewhere -----------------------------------------------------------------------------------------


def test_a_traced_argument_is_moved_and_its_gradient_comes_back():
    there = jax.device_put(ROWS, jax.devices()[3])
    split = xmap(lambda x: jnp.sin(x), ["i", ...], ["i", ...], axis_resources={"i": "x"})
    with Mesh(devices(4), ("x",)):
        gradient = jax.grad(lambda x: jnp.sum(split(x)))(there)
        pushed = jax.vjp(split, there)[1](there)[0]
    assert gradient.devices() == pushed.devices() == there.devices()
    np.testing.assert_allclose(gradient, np.cos(ROWS), rtol=1e-6)
    np.testing.assert_allclose(pushed, np.cos(ROWS) * ROWS, rtol=1e-6)


def test_arrays_on_different_devices_meet_without_a_mesh():
    here, there = (jax.device_put(ROWS, device) for device in jax.devices()[2:4])
    product = xmap(lambda x, y: x * y, (["i", ...], ["i", ...]), ["i", ...])
    np.testing.assert_array_equal(product(here, there), ROWS * ROWS)
    gradient = jax.grad(lambda x: jnp.sum(product(x, there)))(here)
    np.testing.assert_array_equal(gradient, ROWS)
    assert gradient.devices() == here.devices()


def test_what_cannot_be_moved_is_said_in_words():
    there = jax.device_put(ROWS, jax.devices()[7])

    def closing(w):
        return xmap(lambda x: x * w[0], ["i", ...], ["i", ...], axis_resources={"i": "x"})(ROWS)

    with Mesh(devices(4), ("x",)), pytest.raises(ValueError, match="xmap of <lambda>: an argument or a value that the"):
        jax.grad(lambda w: jnp.sum(closing(w)))(there)


def test_resources_of_an_unknown_axis_are_reported_once():
    def body(x):
        return 2 * x

    resources = {"i": "x", "nowhere": "x"}

    def call():
        return xmap(body, ["i", ...], ["i", ...], axis_resources=resources)(ROWS)

    with mesh(devices(4), ("x",)):
        with pytest.warns(UserWarning, match="axis_resources has 'nowhere', which nothing") as told:
            np.testing.assert_array_equal(call(), 2 * ROWS)
        assert [warning.filename for warning in told if "nowhere" in str(warning.message)] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()


def test_named_axis_of_one_operand_is_summed():
    x, y = np.arange(6.0).reshape(3, 2), np.arange(4.0)
    product = xmap(lambda x, y: xeinsum("i{a},j->ij", x, y), [["a", ...], [...]], [...])(x, y)
    np.testing.assert_array_equal(product, np.einsum("ai,j->ij", x, y))


def test_gather_over_two_names_counts_the_last_fastest():
    x, index = np.arange(12.0).reshape(3, 2, 2), np.array([5, 0, 1, 4])
    found = xmap(lambda x: pgather(x, index, ("a", "b")), ["a", "b", ...], [...])(x)
    np.testing.assert_array_equal(found, x.reshape(6, 2)[index])


def test_einsum_without_names_accepts_use_xeinsum():
    x, y = np.arange(6.0).reshape(3, 2), np.arange(12.0).reshape(3, 2, 2)
    np.testing.assert_array_equal(einsum("ij,ijk->ik", x, y, _use_xeinsum=True), np.einsum("ij,ijk->ik", x, y))


def test_einsum_rejects_an_unknown_keyword():
    with pytest.raises(TypeError, match="use_xeinsum"):
        einsum("i->", np.ones(2), use_xeinsum=True)
